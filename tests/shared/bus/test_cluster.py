"""What a cluster of three nodes does that one node does not."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from shared import topology
from shared.bus.rabbit import RabbitBus
from shared.errors import QueueDown, Unanswered
from tests.shared.bus.deliveries import publish, take_bodies
from tests.support.deployment.broker import RabbitCluster

pytestmark = [pytest.mark.rabbit, pytest.mark.timeout(300)]


async def answered(ask: Callable[[], Awaitable[object]]) -> None:
    """Ask until the cluster answers. With Khepri it first elects another leader."""
    async with asyncio.timeout(60):
        while True:
            with suppress(Unanswered):
                await ask()
                return


async def test_a_node_dies_for_good(own_cluster: RabbitCluster) -> None:
    doomed, *others = own_cluster.nodes
    jobs = topology.jobs_queue("m", "interactive")
    log = topology.reply_queue("cmpl-1", expires_s=60)
    async with RabbitBus(doomed.url) as theirs, RabbitBus(others[0].url) as bus:
        await theirs.declare(log, jobs)
        await publish(theirs, jobs, [b"job"])
        async with bus.consume(log.name, is_exclusive=True) as consumer:
            await asyncio.to_thread(doomed.kill)
            with pytest.raises((QueueDown, Unanswered)):
                await anext(consumer)

        with pytest.raises(QueueDown):
            await answered(lambda: bus.inspect(log.name))
        with pytest.raises(QueueDown):
            await answered(lambda: bus.declare(log))
        async with bus.consume(jobs.name, prefetch=1) as jobs_left:
            assert await take_bodies(jobs_left, 1) == [b"job"]
