"""The example that submits many jobs over AMQP writes a line for each, whatever workers do."""

import asyncio
import json
import random
import sys
from pathlib import Path

import pytest

from shared import topology
from shared.bus.rabbit import RabbitBus
from tests.support.deployment.broker import Broker
from tests.support.workers.batch_worker import BatchWorker, answer_text, working

EXAMPLE = Path(__file__).parents[2] / "examples" / "amqp_batch.py"
MODEL = "amqp-batch"
QUESTIONS = [f"question {number}" for number in range(300)]
QUESTIONS[7] = "too long"


@pytest.mark.rabbit
async def test_every_line_has_one_answer(broker: Broker, tmp_path: Path) -> None:
    path = tmp_path / "questions.txt"
    path.write_text("\n".join(QUESTIONS))
    async with RabbitBus(broker.url_of("worker")) as bus:
        await topology.declare_worker(bus, MODEL, "batch")
        worker = BatchWorker(bus, model=MODEL, faults=random.Random(3))
        async with working(worker):
            status, output, _ = await run_example(broker.url_of("publisher"), str(path), MODEL)

    assert status == 0

    lines = {line["line"]: line for line in map(json.loads, output.splitlines())}
    assert len(output.splitlines()) == len(lines)
    assert lines.pop(8) == {"line": 8, "error": "context_length_exceeded: Too long."}
    assert lines == {
        number: {"line": number, "text": answer_text(question)}
        for number, question in enumerate(QUESTIONS, 1)
        if number != 8
    }
    assert worker.num_answers.total() > len(QUESTIONS), "no worker died"
    assert worker.max_ready <= 256


async def test_without_a_file_the_usage_is_shown() -> None:
    status, _, errors = await run_example("amqp://nobody@127.0.0.1:1/")

    assert (status, "Usage: python amqp_batch.py" in errors) == (1, True)
    assert "Traceback" not in errors


@pytest.mark.rabbit
async def test_a_model_that_was_never_served_is_an_error(broker: Broker, tmp_path: Path) -> None:
    path = tmp_path / "questions.txt"
    path.write_text("question\n")

    answer = await run_example(broker.url_of("publisher"), str(path), "never-served")

    assert answer == (
        1,
        "",
        "No worker has ever served the model 'never-served'.\n",
    )


async def run_example(*args: str) -> tuple[int | None, str, str]:
    """The exit code, output and errors of the example."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(EXAMPLE), *args),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    return process.returncode, output.decode(), errors.decode()
