"""What a cluster of three nodes does that one node does not."""

import asyncio

import pytest

from shared import topology
from shared.bus.base import Bus, Queue
from shared.bus.rabbit import RabbitBus
from shared.errors import QueueBusy, QueueDown
from tests.shared.bus.deliveries import PATIENCE_S, numbered, publish, take_bodies
from tests.support.deployment.broker import RabbitCluster

pytestmark = [pytest.mark.rabbit, pytest.mark.timeout(300)]

KEPT = f"cmpl-{topology.KEPT_MARK}{'0' * 32}"


async def declare_and_consume(bus: Bus, queue: Queue) -> None:
    """A broker from 3.11 on accepts the declaration of a queue that is down, without effect."""
    await bus.declare(queue)
    async with bus.consume(queue.name, is_exclusive=True):
        pass


async def test_a_node_dies_for_good(own_cluster: RabbitCluster) -> None:
    doomed, *others = own_cluster.nodes
    jobs = topology.jobs_queue("m", "interactive")
    log = topology.reply_queue("cmpl-1", expires_s=60)
    async with RabbitBus(doomed.url) as theirs, RabbitBus(others[0].url) as bus:
        await theirs.declare(log, jobs)
        await publish(theirs, jobs, [b"job"])
        async with bus.consume(log.name, is_exclusive=True) as consumer:
            await asyncio.to_thread(doomed.kill)
            with pytest.raises(QueueDown):
                await anext(consumer)

        with pytest.raises(QueueDown):
            await bus.inspect(log.name)
        with pytest.raises(QueueDown):
            await declare_and_consume(bus, log)
        async with bus.consume(jobs.name, prefetch=1) as jobs_left:
            assert await take_bodies(jobs_left, 1) == [b"job"]


async def test_a_kept_log_outlives_its_reader_and_the_node_of_both(
    own_cluster: RabbitCluster,
) -> None:
    doomed, *others = own_cluster.nodes
    log = topology.reply_queue(KEPT, expires_s=60)
    async with RabbitBus(others[0].url) as bus:
        async with RabbitBus(doomed.url) as theirs:
            await theirs.declare(log)
            await publish(bus, log, numbered(5))
            async with topology.consume_log(theirs, log.name) as consumer:
                await take_bodies(consumer, 5)
                await asyncio.to_thread(doomed.kill)
        await publish(bus, log, [b"5"])
        bodies = await read_once_free(bus, log, 6)

    assert bodies == [*numbered(5), b"5"]


async def read_once_free(bus: Bus, log: Queue, count: int) -> list[bytes]:
    """Read the log once the broker knows that its last reader is gone."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                async with topology.consume_log(bus, log.name) as consumer:
                    return await take_bodies(consumer, count)
            except (QueueBusy, QueueDown):
                await asyncio.sleep(0.05)
