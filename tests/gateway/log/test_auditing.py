"""Workers that compute something else than they claim are found out by others."""

import asyncio
import logging
from collections.abc import AsyncIterator
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
from worker.model.loading import fingerprint

OUTCOMES = ("equal", "different", "skipped")


@pytest.fixture
async def fleet() -> AsyncIterator[AsyncExitStack]:
    """Workers that a test starts; they end with it."""
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
def checkpoint(tmp_path: Path, smollm2_tokenizer: Path) -> Path:
    directory = tmp_path / "true" / "model"
    directory.mkdir(parents=True)
    write_tiny_model(directory, "llama", vocab_size=49152)
    (directory / "tokenizer.json").symlink_to(smollm2_tokenizer)
    return directory


@pytest.fixture
def smollm2_tokenizer() -> Path:
    return store.resolve("smollm2") / "tokenizer.json"


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


async def ask(gateway: LiveGateway, number: int, model: str = "model", **headers: str) -> str:
    body = {
        "model": model,
        "prompt": f"Question {number}",
        "max_tokens": 24,
        "seed": number,
        "ignore_eos": True,
    }
    answer = await gateway.http.post("/v1/completions", json=body, headers=headers)
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

        counted = await audits(gateway, 4)

    assert counted["different"] == 0
    assert counted["equal"] >= 1


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
    options = {"dtype": "float32", "max_num_seqs": 2}
    for _ in range(2):
        await fleet.enter_async_context(real_worker(broker, model=str(checkpoint), **options))
    false = with_a_changed_weight(checkpoint, tmp_path)
    await fleet.enter_async_context(
        counterfeit_worker(broker, claimed, model=str(false), **options)
    )
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
        assert one["at_token"] < 24
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
