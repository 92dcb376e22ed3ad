"""What is checked of a file as a whole. `test_batches` has the checks of its lines."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest

from gateway.api.bodies.quick import EmbeddingRequest
from gateway.batches import checking
from gateway.batches.bad_lines import BadInput, read_line
from gateway.batches.lines import ENDPOINTS, InputLine
from gateway.intake.keys.api_key import ApiKey
from shared import settings
from shared.bus.memory import MemoryBus
from shared.errors import Unavailable
from shared.settings import GatewaySettings
from tests.support.gateway.batches import CHATS, chat, ended, order
from tests.support.gateway.http import live_gateway
from tests.support.workers.scripted_worker import ScriptedWorker, repeat_the_prompt

MODELS = ("one", "two", "three")


@pytest.fixture
async def workers(worker_bus: MemoryBus) -> AsyncIterator[None]:
    """A worker for each model."""
    async with AsyncExitStack() as running:
        for model in MODELS:
            worker = ScriptedWorker(worker_bus, repeat_the_prompt, model)
            await running.enter_async_context(worker)
        yield


async def errors_of(
    bus: MemoryBus, data_dir: Path, lines: list[object]
) -> list[tuple[int | None, str | None, str | None]]:
    """The lines, codes and messages of the errors of a file."""
    async with live_gateway(bus, data_dir=data_dir) as gateway:
        batch = await ended(gateway, await order(gateway, lines))
    assert batch.status == "failed"
    assert batch.errors is not None
    return [(error.line, error.code, error.message) for error in batch.errors.data or ()]


async def test_errors_beyond_the_limit_are_counted(
    bus: MemoryBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking, "_MAX_ERRORS", 2)

    errors = await errors_of(bus, tmp_path, ["not JSON"] * 5)

    assert [(line, code) for line, code, _ in errors] == [
        (1, "invalid_json_line"),
        (2, "invalid_json_line"),
        (None, "too_many_errors"),
    ]
    assert errors[-1][2] == "There are 3 more errors."


def test_what_an_error_contains_is_limited() -> None:
    checked = checking.Checked()

    checked.add(BadInput("invalid_request", "m" * 9999, "p" * 9999), 1)

    (error,) = checked.errors
    assert (error["message"], error["param"]) == ("m" * 500, "p" * 200)


def test_the_errors_of_a_batch_are_limited_in_size() -> None:
    checked = checking.Checked()

    for line in range(1000):
        checked.add(BadInput("invalid_request", "\N{GRINNING FACE}" * 500), line)

    assert [error["line"] for error in checked.errors] == list(range(10))
    assert len(json.dumps(checked.errors)) <= 64 << 10
    assert checked.num_errors == 1000


async def test_a_name_of_the_client_is_cut_in_an_error(
    bus: MemoryBus, workers: None, tmp_path: Path
) -> None:
    line = chat("a", model=MODELS[0], structured_outputs={"k" * 9999: 1})

    ((_, code, message),) = await errors_of(bus, tmp_path, [line])

    name = f"structured_outputs.{'k' * 64}"
    assert (code, message) == ("invalid_request", f"{name} is not supported.")


async def test_the_models_of_a_file_are_limited(
    bus: MemoryBus, workers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking, "_MAX_MODELS", 2)
    lines: list[object] = [chat(model, model=model) for model in MODELS]

    errors = await errors_of(bus, tmp_path, [*lines, chat("again", model=MODELS[0])])

    assert errors == [(3, "too_many_models", "The file has more than 2 models.")]


class AskedLock(asyncio.Lock):
    """A lock that says when somebody waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_awaited = asyncio.Event()

    async def acquire(self) -> Literal[True]:
        if self.locked():
            self.is_awaited.set()
        return await super().acquire()


async def test_large_lines_are_checked_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "_LARGE_BYTES", 20_000)
    large = AskedLock()
    async with large:
        checked = asyncio.create_task(check_of(chat("a", "x" * 9999), large))
        await large.is_awaited.wait()
        assert (await check_of(chat("b"), large)).models == ["scripted"]
        assert not checked.done()

    assert (await checked).models == ["scripted"]


async def test_a_check_that_is_tried_again_holds_up_no_large_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checking, "_LARGE_BYTES", 0)
    monkeypatch.setattr(checking, "_PAUSE_S", 600.0)
    large = asyncio.Lock()
    has_failed = asyncio.Event()
    stuck = asyncio.create_task(check_of(chat("a"), large, has_failed))
    await has_failed.wait()

    assert (await check_of(chat("b"), large)).models == ["scripted"]

    assert not stuck.done()
    stuck.cancel()


async def check_of(
    line: dict[str, Any], large: asyncio.Lock, has_failed: asyncio.Event | None = None
) -> checking.Checked:
    """Check a file of one line at a gateway without workers, which cannot be asked for one if there
    is an event ``has_failed``."""

    async def find(_: str) -> None:
        if has_failed is not None:
            has_failed.set()
            raise Unavailable("no worker")

    gateway = SimpleNamespace(
        settings=settings.load(GatewaySettings), workers=SimpleNamespace(find=find)
    )

    async def lines() -> AsyncIterator[InputLine]:
        yield InputLine(1, json.dumps(line).encode())

    key = ApiKey("", "", "", "")
    return await checking.check(cast("Any", gateway), CHATS, key, lines(), large)


@pytest.mark.parametrize(
    "text",
    [
        b'{"custom_id":"a","url":"/v1/embeddings","body":{"model":null,"model":"m","input":"x"}}',
        b'{"custom_id":"a","url":"/v1/embeddings","body":5,"body":{"model":"m","input":"x"}}',
        b'{"custom_id":"b","url":"/v1/embeddings","body":{"model":"m","input":"x"},"custom_id":"a"}',
    ],
)
def test_the_last_of_two_equal_names_counts_during_the_check_and_after_it(text: bytes) -> None:
    line = InputLine(1, text)

    checked = read_line(text)
    request = ENDPOINTS[checked.url].read(bytes(checked.body))

    assert isinstance(request, EmbeddingRequest)
    assert (line.custom_id, line.model) == (checked.custom_id, request.model) == ("a", "m")
