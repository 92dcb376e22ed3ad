import asyncio
import random
import uuid
from contextlib import suppress
from pathlib import Path

import pytest

from cli.batch.pipeline import run_batch
from shared import topology
from shared.bus.rabbit import RabbitBus
from tests.support.deployment.broker import Broker
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
