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


async def run_example(*args: str) -> tuple[int | None, str, str]:
    """The exit code, output and errors of the example."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        EXAMPLE,
        *args,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    return process.returncode, output.decode(), errors.decode()


async def test_without_a_question_the_usage_is_shown() -> None:
    status, _, errors = await run_example("amqp://nobody@127.0.0.1:1/")

    assert (status, "Usage: python publish_with_pika.py" in errors) == (1, True)
    assert "Traceback" not in errors


@pytest.mark.rabbit
async def test_the_example_asks_with_a_publishers_permissions(own_broker: RabbitNode) -> None:
    unknown = await run_example(own_broker.url_of("publisher"), "Where is Paris?")
    async with RabbitBus(own_broker.url_of("worker")) as bus:
        await topology.declare_worker(bus, MODEL, "pika")
        async with working(BatchWorker(bus, model=MODEL)):
            answered = await run_example(own_broker.url_of("publisher"), "Where is Paris?")
            refused = await run_example(own_broker.url_of("publisher"), "too long")

    assert unknown == (1, "", "the model smollm2 does not exist: no worker has ever served it\n")
    assert answered == (0, f"{answer_text('Where is Paris?')}\n", "")
    assert refused == (1, "", "context_length_exceeded: Too long.\n")
