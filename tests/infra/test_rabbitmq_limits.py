"""The shipped policies bound what the broker stores."""

import asyncio
import json

import pytest

from shared import topology
from shared.bus.base import Message
from shared.bus.rabbit import RabbitBus
from shared.errors import PublishRefused
from tests.infra.test_rabbitmq_definitions import DEFINITIONS
from tests.support.deployment.broker import RabbitNode

pytestmark = [pytest.mark.rabbit, pytest.mark.breaks_broker]

JOBS = topology.jobs_queue("limits-test", "interactive")
BODY = bytes(1_000)
SMALL = {"max-length": 5, "max-length-bytes": 10_000}
"""Limits that a test reaches quickly, in place of the shipped ones."""
LAST = [b"15", b"16", b"17", b"18", b"19"]
"""The dead letters that are kept of 20."""


def shrink(broker: RabbitNode) -> None:
    """Lower the limits of the shipped policies, and keep everything else."""
    for policy in DEFINITIONS["policies"]:
        small = {key: SMALL.get(key, value) for key, value in policy["definition"].items()}
        broker.ctl(
            "set_policy", "--vhost", "warren", policy["name"], policy["pattern"], json.dumps(small)
        )


async def bodies(bus: RabbitBus, queue: str) -> list[bytes]:
    """The bodies of the messages in a queue, which stay there."""
    state = await bus.inspect(queue)
    assert state is not None
    async with bus.consume(queue) as consumer:
        return [(await anext(consumer)).message.body for _ in range(state.num_ready)]


async def refuse_more(bus: RabbitBus) -> None:
    """Publish jobs until the broker refuses one."""
    for _ in range(100):
        await bus.publish(JOBS.bindings[0], Message(BODY))


async def bury(bus: RabbitBus, num_jobs: int) -> None:
    """Publish jobs of which a worker rejects each."""
    async with bus.consume(JOBS.name, prefetch=1) as consumer:
        for k in range(num_jobs):
            await bus.publish(JOBS.bindings[0], Message(b"%d" % k))
            await (await anext(consumer)).reject()


async def test_stored_bytes_and_dead_letters_are_bounded(own_broker: RabbitNode) -> None:
    await asyncio.to_thread(shrink, own_broker)
    async with (
        RabbitBus(own_broker.url_of("worker")) as worker,
        RabbitBus(own_broker.url_of("publisher")) as publisher,
    ):
        await worker.declare(topology.DEAD_LETTERS, JOBS)

        await bury(worker, 20)
        with pytest.raises(PublishRefused):
            await refuse_more(publisher)

        assert 10 <= len(await bodies(worker, JOBS.name)) < 100
        async with asyncio.timeout(30):
            # Dead letters arrive asynchronously.
            while await bodies(worker, topology.DEAD_LETTERS.name) != LAST:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
