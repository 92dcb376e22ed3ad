"""What a cluster of three nodes does that a single node does not."""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack

import pytest

from shared import topology
from shared.bus.base import Bus, Queue
from shared.bus.rabbit import RabbitBus
from shared.bus.rabbit import bus as bus_module
from shared.errors import QueueDown
from tests.shared.bus.deliveries import eventually, publish, take_bodies
from tests.support.deployment.broker import RabbitCluster, RabbitNode, running_cluster

COUNT_CONNECTIONS = """
    length([Pid
        || Pid <- rabbit_networking:local_connections(),
        [{client_properties, Properties}] <- [
            catch rabbit_networking:connection_info(Pid, [client_properties])],
        is_list(Properties), % none before the client has sent them
        lists:member({<<"connection_name">>, longstr, <<"warren publish">>}, Properties)])
"""

pytestmark = [pytest.mark.rabbit, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RabbitCluster]:
    """The nodes of all tests, the last of which leaves a node dead."""
    with running_cluster() as cluster:
        yield cluster


async def declare_and_consume(bus: Bus, queue: Queue) -> None:
    """A broker from 3.11 on accepts the declaration of a queue that is down, without effect."""
    await bus.declare(queue)
    async with bus.consume(queue.name, is_exclusive=True):
        pass


async def test_publishing_returns_to_a_node_that_has_come_back(
    cluster: RabbitCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus_module, "_COME_BACK_S", (0.5, 0.5))
    urls = ",".join(node.url for node in cluster.nodes)
    async with AsyncExitStack() as stack:
        # Each connection begins at a random node.
        buses = [await stack.enter_async_context(RabbitBus(urls)) for _ in range(8)]
        before, doomed = max(
            [(await connections_to(node), node) for node in cluster.nodes], key=lambda item: item[0]
        )
        await asyncio.to_thread(doomed.kill)
        await asyncio.to_thread(doomed.start)
        for bus in buses:
            await bus.wait_connected()
        await eventually(lambda: has_connections(doomed, before))
        jobs = topology.jobs_queue("m", "interactive")
        for bus in buses:
            await bus.declare(jobs)
            await publish(bus, jobs, [b"job"])
            async with bus.consume(jobs.name, prefetch=1) as consumer:
                await (await anext(consumer)).ack()

    assert before > 0


async def test_a_node_dies_for_good(cluster: RabbitCluster) -> None:
    doomed, *others = cluster.nodes
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


async def connections_to(node: RabbitNode) -> int:
    """The number of connections for publishing to a node."""
    return int(await asyncio.to_thread(node.evaluate, COUNT_CONNECTIONS))


async def has_connections(node: RabbitNode, number: int) -> bool:
    return await connections_to(node) >= number
