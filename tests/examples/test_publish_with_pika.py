import asyncio
import sys
from pathlib import Path

import pytest

from shared import topology
from shared.bus.rabbit import RabbitBus
from tests.support.deployment.broker import RabbitNode
from tests.support.workers.batch_worker import BatchWorker, answer_text, working

EXAMPLE = Path(__file__).parents[2] / "examples" / "publish_with_pika.py"
MODEL = "smollm2"


async def run_example(url: str, question: str) -> tuple[int | None, str, str]:
    """The exit code, output and errors of the example."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        EXAMPLE,
        url,
        question,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    return process.returncode, output.decode(), errors.decode()


@pytest.mark.rabbit
async def test_the_example_asks_with_a_publishers_permissions(own_broker: RabbitNode) -> None:
    async with RabbitBus(own_broker.url_of("worker")) as bus:
        await topology.declare_worker(bus, MODEL, "pika")
        async with working(BatchWorker(bus, model=MODEL)):
            answered = await run_example(own_broker.url_of("publisher"), "Where is Paris?")
            refused = await run_example(own_broker.url_of("publisher"), "too long")

    assert answered == (0, f"{answer_text('Where is Paris?')}\n", "")
    assert refused == (1, "", "context_length_exceeded: Too long.\n")
