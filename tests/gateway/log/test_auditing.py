"""Workers that compute something else than they claim are found out by others."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gateway.log.auditing import Disagreement, difference, is_drawn
from shared.bus.memory import MemoryBroker
from shared.log import TokenChain
from tests.support import PATIENCE_S
from tests.support.gateway.http import LiveGateway, live_gateway
from tests.support.metrics import total
from tests.support.models.tiny import write_tiny_model
from tests.support.workers.synthetic import counterfeit_worker, echo_worker, real_worker
from worker.checkpoints import store
from worker.decode.served_model import ServedModel
from worker.model.loading import fingerprint
from worker.model.runner import TorchRunner

NUM_TOKENS = 24
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SMALL: Mapping[str, Any] = {"dtype": "float32", "max_num_seqs": 2}
OUTCOMES = ("equal", "different", "skipped")


@pytest.fixture
async def fleet() -> AsyncIterator[AsyncExitStack]:
    """Workers that a test starts; they end with it."""
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("true") / "model"
    directory.mkdir()
    write_tiny_model(directory, "llama", vocab_size=49152)
    (directory / "tokenizer.json").symlink_to(store.resolve("smollm2") / "tokenizer.json")
    return directory


def with_a_changed_weight(checkpoint: Path, place: Path) -> Path:
    """A checkpoint of the same name in which a tensor differs by a tenth."""
    directory = place / "false" / "model"
    directory.mkdir(parents=True)
    for file in checkpoint.iterdir():
        if file.suffix != ".safetensors":
            (directory / file.name).symlink_to(file)
            continue
        tensors: dict[str, torch.Tensor] = load_file(file)
        name = next(name for name in tensors if "mlp.down_proj" in name)
        tensors[name] = tensors[name] * 1.1
        save_file(tensors, directory / file.name, {"format": "pt"})
    return directory


def break_memory_of(model: ServedModel) -> None:
    """Change the last norm of a model that serves, as broken memory does."""
    assert isinstance(model.runner, TorchRunner)
    decoder: Any = model.runner.decoder
    weight = decoder._decoder._model.norm.weight
    assert weight is not None
    weight[:8] *= 2


async def ask(gateway: LiveGateway, number: int, model: str = "model", **headers: str) -> str:
    body = {"model": model, "seed": number, "prompt": f"Question {number}"}
    return await post(gateway, COMPLETIONS, body, **headers)


async def post(gateway: LiveGateway, path: str, body: Mapping[str, Any], **headers: str) -> str:
    """Ask for an answer of 24 tokens, unless ``body`` says otherwise. Returns its id."""
    body = {"max_tokens": NUM_TOKENS, "ignore_eos": True, **body}
    answer = await gateway.http.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    request_id: str = answer.headers["x-request-id"]
    return request_id


async def audits(gateway: LiveGateway, num_expected: int) -> dict[str, float]:
    """The outcomes, once there are so many."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            text = (await gateway.http.get("/metrics")).text
            name = "warren_gateway_audits_total"
            counted = {one: total(text, name, outcome=one) for one in OUTCOMES}
            if sum(counted.values()) >= num_expected:
                return counted
            await asyncio.sleep(0.02)


def disagreements(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    event = "workers disagree about an answer"
    return [vars(record) for record in caplog.records if record.getMessage() == event]


async def test_answers_of_equal_workers_are_equal(
    broker: MemoryBroker, fleet: AsyncExitStack
) -> None:
    for _ in range(2):
        await fleet.enter_async_context(echo_worker(broker))
    async with live_gateway(broker, audit_share=1.0) as gateway:
        for number in range(4):
            await ask(gateway, number, "echo")
            # In turns, so that the next try of an audit comes to the other worker.
            counted = await audits(gateway, number + 1)

    assert counted == {"equal": 4, "different": 0, "skipped": 0}


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"n": 3, "seed": 1}, id="choices"),
        pytest.param({"prompt": ["One", "Two"]}, id="prompts"),
        pytest.param(
            {"structured_outputs": {"regex": "[a-z ]{20}"}, "ignore_eos": False}, id="regex"
        ),
    ],
)
async def test_answers_of_all_kinds_are_audited(
    broker: MemoryBroker, fleet: AsyncExitStack, more: dict[str, Any]
) -> None:
    for _ in range(2):
        await fleet.enter_async_context(echo_worker(broker))
    async with live_gateway(broker, audit_share=1.0) as gateway:
        await post(gateway, COMPLETIONS, {"model": "echo", "prompt": "Question", **more})

        assert await audits(gateway, 1) == {"equal": 1, "different": 0, "skipped": 0}


async def test_forks_are_audited(broker: MemoryBroker, fleet: AsyncExitStack) -> None:
    for _ in range(2):
        await fleet.enter_async_context(echo_worker(broker))
    body = {"model": "echo", "prompt": "Question"}
    async with live_gateway(broker, audit_share=1.0, disconnect_grace_s=60) as gateway:
        first = await post(gateway, COMPLETIONS, {**body, "detach": True})
        await audits(gateway, 1)
        await post(gateway, f"/v1/streams/{first}/fork?at=9", {**body, "seed": 2})

        assert await audits(gateway, 2) == {"equal": 2, "different": 0, "skipped": 0}


async def test_a_worker_with_wrong_options_is_the_suspect(
    broker: MemoryBroker, fleet: AsyncExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends answers early, because its context is shorter than that of the others."""
    for max_seq_len in (128, 128, 64):
        await fleet.enter_async_context(echo_worker(broker, max_seq_len=max_seq_len))
    body = {
        "model": "echo",
        "messages": [{"role": "user", "content": "Question"}],
        "max_tokens": None,
    }
    async with live_gateway(broker, audit_share=1.0) as gateway:
        with caplog.at_level(logging.ERROR):
            for number in range(6):
                await post(gateway, CHAT, {**body, "seed": number})
                counted = await audits(gateway, number + 1)

    named = disagreements(caplog)
    assert counted["different"] >= 1
    assert len({one["suspect"] for one in named} - {None}) == 1
    assert all(None in (one["stated"], one["drawn"]) for one in named)


async def test_a_worker_whose_memory_breaks_is_the_suspect_from_then_on(
    broker: MemoryBroker,
    fleet: AsyncExitStack,
    checkpoint: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    models: list[ServedModel] = []
    for _ in range(3):
        await fleet.enter_async_context(
            real_worker(broker, models.append, model=str(checkpoint), **SMALL)
        )
    async with live_gateway(broker, audit_share=1.0) as gateway:
        for number in range(3):
            await ask(gateway, number)
            sound = await audits(gateway, number + 1)
        break_memory_of(models[0])
        with caplog.at_level(logging.ERROR):
            for number in range(12):
                await ask(gateway, number)
            counted = await audits(gateway, 15)

    assert sound["different"] == 0
    assert counted["different"] >= 1
    assert len({one["suspect"] for one in disagreements(caplog)} - {None}) == 1


async def test_a_worker_that_is_alone_is_not_audited(
    broker: MemoryBroker, fleet: AsyncExitStack
) -> None:
    await fleet.enter_async_context(echo_worker(broker))
    async with live_gateway(broker, audit_share=1.0) as gateway:
        for number in range(3):
            await ask(gateway, number, "echo")

        assert await audits(gateway, 3) == {"equal": 0, "different": 0, "skipped": 3}


async def test_an_answer_that_is_repeated_for_its_key_is_not_audited_again(
    broker: MemoryBroker, fleet: AsyncExitStack
) -> None:
    await fleet.enter_async_context(echo_worker(broker))
    async with live_gateway(broker, audit_share=1.0) as gateway:
        key = {"idempotency-key": "once"}
        assert await ask(gateway, 1, "echo", **key) == await ask(gateway, 1, "echo", **key)
        await ask(gateway, 2, "echo")

        assert await audits(gateway, 2) == {"equal": 0, "different": 0, "skipped": 2}


async def test_the_worker_with_a_changed_weight_the_request_and_the_token_are_named(
    broker: MemoryBroker,
    fleet: AsyncExitStack,
    checkpoint: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    claimed = fingerprint(checkpoint)
    for _ in range(2):
        await fleet.enter_async_context(real_worker(broker, model=str(checkpoint), **SMALL))
    false = with_a_changed_weight(checkpoint, tmp_path)
    await fleet.enter_async_context(counterfeit_worker(broker, claimed, model=str(false), **SMALL))
    async with live_gateway(broker, audit_share=1.0) as gateway:
        with caplog.at_level(logging.ERROR):
            asked = [await ask(gateway, number) for number in range(12)]
            counted = await audits(gateway, 12)
            shown = (await gateway.http.get("/admin/v1/status")).json()["disagreements"]

    named = disagreements(caplog)
    facts = {(one["request_id"], one["choice"], one["at_token"]) for one in named}
    assert {(one["request_id"], one["choice"], one["at_token"]) for one in shown} <= facts
    assert counted["different"] >= 1
    assert len({one["suspect"] for one in named} - {None}) == 1
    for one in named:
        assert one["request_id"] in asked
        assert one["at_token"] < NUM_TOKENS
        assert one["stated"] != one["drawn"]
        assert one["suspect"] in (one["worker"], one["other_worker"], None)


@pytest.mark.parametrize(
    ("drawn", "is_finished", "found"),
    [
        ([1, 2], False, None),
        ([1, 2, 3], True, None),
        ([1, 9], False, Disagreement(0, 1, 2, 9)),
        ([1, 2], True, Disagreement(0, 2, 3, None)),
        ([1, 2, 3, 4], False, Disagreement(0, 3, None, 4)),
    ],
)
def test_the_first_token_that_differs_is_found(
    drawn: list[int], is_finished: bool, found: Disagreement | None
) -> None:
    chain = TokenChain(token_ids=drawn, is_finished=is_finished)

    assert difference(((1, 2, 3),), [chain]) == found


def test_a_share_of_the_requests_is_drawn_by_their_ids() -> None:
    ids = [f"chatcmpl-{number}" for number in range(2000)]

    drawn = [one for one in ids if is_drawn(one, 0.1)]

    assert 140 < len(drawn) < 260
    assert set(drawn) <= {one for one in ids if is_drawn(one, 0.2)}
    assert not is_drawn("audit-1", 1.0)
