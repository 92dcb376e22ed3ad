import asyncio
import random
import sys
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from cli.batch.pipeline import run_batch
from shared import topology
from shared.bus.rabbit import RabbitBus
from tests.support.deployment.broker import Broker
from tests.support.deployment.processes import ROOT
from tests.support.workers.batch_files import chat_line, chat_text, read_lines, write_lines
from tests.support.workers.batch_worker import BatchWorker, answer_text, working


@pytest.mark.rabbit
async def test_an_interrupted_batch_goes_on_over_rabbitmq(broker: Broker, tmp_path: Path) -> None:
    model = f"scripted-{uuid.uuid4().hex}"
    lines = [chat_line(str(k), content=f"question {k}", model=model) for k in range(300)]
    source, output = write_lines(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    async with (
        RabbitBus(broker.url_of("worker")) as theirs,
        RabbitBus(broker.url_of("publisher")) as bus,
    ):
        await topology.declare_worker(theirs, model, "w")
        worker = BatchWorker(theirs, model=model, faults=random.Random(0))
        async with working(worker):
            run = asyncio.create_task(run_batch(source, output, bus, window=16))
            await worker.has_answered(100)
            run.cancel()
            with suppress(asyncio.CancelledError):
                await run

            summary = await run_batch(source, output, bus, window=16)

    assert (summary.num_lines, summary.num_failed) == (300, 0)
    assert [chat_text(answer) for answer in read_lines(output)] == [
        answer_text(f"question {k}") for k in range(300)
    ]


@pytest.mark.rabbit
async def test_a_killed_batch_goes_on_with_its_journal(broker: Broker, tmp_path: Path) -> None:
    model = f"scripted-{uuid.uuid4().hex}"
    lines = [chat_line(str(k), content=f"question {k}", model=model) for k in range(300)]
    source, output = write_lines(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    journal, undisturbed = tmp_path / "out.jsonl.part", tmp_path / "undisturbed.jsonl"

    async def command() -> asyncio.subprocess.Process:
        options = (f"--broker={broker.url_of('publisher')}", "--window=16")
        arguments = ("warren.py", "batch", source, output, *options)
        return await asyncio.create_subprocess_exec(sys.executable, *arguments, cwd=ROOT)

    async with (
        RabbitBus(broker.url_of("worker")) as theirs,
        RabbitBus(broker.url_of("publisher")) as bus,
    ):
        await topology.declare_worker(theirs, model, "w")
        worker = BatchWorker(theirs, model=model, faults=random.Random(0))
        async with working(worker):
            first = await command()
            await worker.has_answered(100)
            first.kill()
            await first.wait()
            num_kept = journal.read_bytes().count(b"\n") - 1
            second = await command()
            code = await second.wait()
            await run_batch(source, undisturbed, bus)

    assert 0 < num_kept < 300
    assert (code, journal.exists()) == (0, False)
    assert [answer["custom_id"] for answer in read_lines(output)] == [str(k) for k in range(300)]
    assert answers(output) == answers(undisturbed)


def answers(output: Path) -> list[dict[str, Any]]:
    """The lines without the time at which each was asked."""
    lines = read_lines(output)
    for line in lines:
        del line["response"]["body"]["created"]
    return lines
