"""Every way to disturb a cluster of three nodes while at least two of them remain."""

import asyncio
import itertools
import logging
import os
import signal
from collections.abc import Callable

from tests.support.deployment.broker import RabbitCluster, RabbitNode
from tests.system.chaos.deployment import SHORT_HEARTBEAT
from tests.system.chaos.surroundings import ALARM_S

logger = logging.getLogger(__name__)

PARTITION_S = 8.0
"""Longer than a client waits for a heartbeat."""
FREEZE_S = 12.0
"""Shorter than the time for which the other nodes wait for a node."""
_WAIT_MS = 60_000
"""The longest time that a node takes to start, and to catch up with the others."""
_AWAIT_STARTUP = f"rabbit:await_startup(node(), false, {_WAIT_MS})."
_AWAIT_QUORUM = f"rabbit_upgrade_preparation:await_online_quorum_plus_one({_WAIT_MS})."
_MAX_REPAIRS = 4
_PART = (
    "spawn(fun() ->"
    " Others = nodes(),"
    " Cookie = erlang:get_cookie(),"
    " [erlang:set_cookie(Other, none) || Other <- Others],"
    " [erlang:disconnect_node(Other) || Other <- Others],"
    " timer:sleep(%d),"
    " [erlang:set_cookie(Other, Cookie) || Other <- Others]"
    " end)."
)
"""A node that has another cookie than its peers neither reaches them nor is reached."""


class ClusterFaults:
    """Each fault strikes another node than the last fault, once all queues can do without it. An
    operator takes a lost node out of the cluster after ``loss_s``, and clients are watched for as
    long then."""

    def __init__(self, cluster: RabbitCluster, *, loss_s: float = 10) -> None:
        self._loss_s = loss_s
        self._all = cluster.nodes
        self._nodes = itertools.cycle(cluster.nodes)

    async def kill_node(self) -> None:
        """It loses its connections and, until it returns, the logs that it keeps."""
        await self._replace(RabbitNode.kill)

    async def upgrade_node(self) -> None:
        """What a rolling upgrade does to each node in turn."""
        await self._replace(_drain)

    async def part_node(self) -> None:
        """The others go on, and it pauses until it reaches them again."""
        node = await self._next()
        part = _PART % (PARTITION_S * 1000)
        await asyncio.to_thread(node.evaluate, part)
        await asyncio.sleep(PARTITION_S)
        await asyncio.to_thread(node.evaluate, _AWAIT_STARTUP)

    async def freeze_node(self) -> None:
        """It neither answers nor closes its connections, as if its machine had lost power, until it
        goes on."""
        node = await self._next()
        os.kill(node.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(FREEZE_S)
        finally:
            os.kill(node.pid, signal.SIGCONT)

    async def move_leaders(self) -> None:
        """Rebalance the leaders of the quorum queues."""
        node = await self._next()
        await asyncio.to_thread(node.queues, "rebalance", "quorum")

    async def fill_disk(self) -> None:
        """Take the disk space of a node: all nodes stop reading from publishers."""
        node = await self._next()
        await asyncio.to_thread(node.ctl, "set_disk_free_limit", "mem_relative", "100000")
        await asyncio.sleep(ALARM_S)
        await asyncio.to_thread(node.ctl, "set_disk_free_limit", "50MB")

    async def lose_node(self) -> None:
        """It never returns, and an operator takes it out of the cluster. No other fault may follow,
        as the two others cannot do without each other."""
        first, *_, lost = self._all
        await self._wait_whole(lost)
        await asyncio.to_thread(lost.kill)
        await asyncio.sleep(self._loss_s)
        await asyncio.to_thread(first.ctl, "forget_cluster_node", lost.name)
        await asyncio.sleep(self._loss_s)

    async def _replace(self, end: Callable[[RabbitNode], None]) -> None:
        node = await self._next()
        await asyncio.to_thread(end, node)
        await asyncio.to_thread(node.start)

    async def _next(self) -> RabbitNode:
        node = next(self._nodes)
        await self._wait_whole(node)
        return node

    async def _wait_whole(self, node: RabbitNode) -> None:
        """Wait until every quorum queue of a node can do without a member."""
        for _ in range(_MAX_REPAIRS):
            if await asyncio.to_thread(node.evaluate, _AWAIT_QUORUM) == "true\n":
                return
            await asyncio.to_thread(self._repair)
        raise AssertionError("members of quorum queues stay down")

    def _repair(self) -> None:
        """Restart the nodes whose members of quorum queues have stayed down after a partition."""
        for node in self._all:
            down = [name for name, online in _online(node).items() if node.name not in online]
            if down:
                logger.warning("restarting %s, whose members are down: %s", node.name, down)
                node.stop()
                node.start()


def _online(node: RabbitNode) -> dict[str, set[str]]:
    """The members of each quorum queue that are online, by its name."""
    rows = node.list_queues("name", "members", "online")
    return {name: set(online.split(",")) for name, members, online in rows if members}


def url_of(cluster: RabbitCluster, user: str) -> str:
    """That of the nodes, whose clients miss their heartbeats soon."""
    return ",".join(node.url_of(user) + SHORT_HEARTBEAT for node in cluster.nodes)


def _drain(node: RabbitNode) -> None:
    node.upgrade("drain")
    node.stop()
