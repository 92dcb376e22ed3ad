"""Receipts in the lines of a batch's output."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.echo_worker import MODEL
from cli.main import app
from gateway.intake.receipts import hash_request
from shared.bus.memory import MemoryBroker
from shared.messages import Receipt
from tests.support.engines.brake import Brake
from tests.support.gateway.batches import CHATS, ended, order, output
from tests.support.gateway.http import LiveGateway, eventually, hears_a_worker, live_gateway
from tests.support.metrics import total
from tests.support.receipts import keys_of, new_signing_key, receipt_of
from tests.support.workers.synthetic import doomed_worker, echo_worker

NUM_TOKENS = 24


@pytest.fixture
async def gateway(broker: MemoryBroker, tmp_path: Path) -> AsyncIterator[LiveGateway]:
    """A gateway whose workers a test starts."""
    async with live_gateway(broker, receipt_keys_file=new_signing_key(tmp_path)) as gateway:
        yield gateway


def line(custom_id: str, **more: Any) -> dict[str, Any]:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "one two three"}],
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        **more,
    }
    return {"custom_id": custom_id, "method": "POST", "url": CHATS, "body": body}


async def answered(gateway: LiveGateway, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The output lines of a batch by their names."""
    batch = await ended(gateway, await order(gateway, lines))
    return {one["custom_id"]: one for one in await output(gateway, batch.output_file_id)}


async def receipt_in(gateway: LiveGateway, answer: dict[str, Any]) -> Receipt:
    return await receipt_of(gateway, answer["response"]["body"]["receipt"])


async def test_each_line_that_asks_for_a_receipt_has_its_own(
    broker: MemoryBroker, gateway: LiveGateway
) -> None:
    lines = [
        line("seeded", seed=5, receipt=True),
        line("equal", seed=5, receipt=True),
        line("greedy", temperature=0, receipt=True),
        line("without"),
    ]
    async with echo_worker(broker):
        await hears_a_worker(gateway)

        answers = await answered(gateway, lines)

    assert "receipt" not in answers["without"]["response"]["body"]
    receipts = {
        name: await receipt_in(gateway, answers[name]) for name in answers.keys() - {"without"}
    }
    for one in lines[:3]:
        name, receipt = one["custom_id"], receipts[one["custom_id"]]
        assert receipt.id == answers[name]["response"]["body"]["id"]
        assert receipt.request_sha256 == hash_request(json.dumps(one["body"]).encode())
        assert len(receipt.choices[0].token_ids) == NUM_TOKENS
    assert receipts["seeded"].choices == receipts["equal"].choices
    assert len({receipt.id for receipt in receipts.values()}) == 3


async def test_a_command_checks_a_line_of_an_output_file(
    broker: MemoryBroker, gateway: LiveGateway, tmp_path: Path
) -> None:
    asked = line("1", receipt=True)
    async with echo_worker(broker):
        await hears_a_worker(gateway)
        answers = await answered(gateway, [asked])
    files = {
        "line": answers["1"],
        "request": asked["body"],
        "keys": await keys_of(gateway),
    }
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    paths = {name: str(tmp_path / name) for name in files}

    words = ["verify", paths["line"], "--keys", paths["keys"], "--request", paths["request"]]
    done = CliRunner().invoke(app, words, catch_exceptions=False)

    assert done.exit_code == 0, done.output
    assert "request    is that of the receipt" in done.output


async def test_the_receipt_of_a_line_names_the_worker_that_took_it_over(
    broker: MemoryBroker, gateway: LiveGateway
) -> None:
    async def are_generated() -> bool:
        text = (await gateway.http.get("/metrics")).text
        return total(text, "warren_gateway_completion_tokens_total") >= 3

    async with doomed_worker(broker, brake=Brake(6)):
        await hears_a_worker(gateway)
        batch = await order(gateway, [line("1", seed=5, receipt=True)])
        await eventually(are_generated)
    async with echo_worker(broker):
        batch = await ended(gateway, batch)
        (answer,) = await output(gateway, batch.output_file_id)
        undisturbed = await answered(gateway, [line("2", seed=5, receipt=True)])

    receipt, expected = [await receipt_in(gateway, one) for one in (answer, undisturbed["2"])]
    first, second = receipt.executions
    assert (first.attempt, second.attempt) == (1, 2)
    assert first.worker != second.worker
    assert first.num_tokens_before == (0,)
    assert 3 <= second.num_tokens_before[0] < NUM_TOKENS
    assert receipt.choices == expected.choices
