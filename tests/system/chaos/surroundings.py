"""The broker and the network to it, and every way to disturb them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.support.deployment.broker import RabbitNode
from tests.support.network.tcp_proxy import TcpProxy
from tests.system.chaos.deployment import SHORT_HEARTBEAT

BLACK_HOLE_S = 8.0
"""Longer than either side waits for a heartbeat."""
ALARM_S = 7.0
"""Longer than the timeout of a confirmation."""
_DELAY_S = 0.05
_DELAYED_S = 3.0
_CONSUMER_TIMEOUT_MS = 3000
_TIMED_OUT_S = 7.0
_NO_CONSUMER_TIMEOUT_MS = 86_400_000
_TICK_MS = 60_000


class Surroundings:
    """A broker, with a network path for the workers and another path for the gateways."""

    def __init__(self, node: RabbitNode, workers: TcpProxy, gateways: TcpProxy) -> None:
        self.node = node
        self.workers = workers
        self.gateways = gateways

    async def restart_broker(self) -> None:
        await asyncio.to_thread(self.node.stop)
        await asyncio.to_thread(self.node.start)

    async def kill_broker(self) -> None:
        await asyncio.to_thread(self.node.kill)
        await asyncio.to_thread(self.node.start)

    async def raise_memory_alarm(self) -> None:
        """The broker stops reading from publishers."""
        await self._ctl("set_vm_memory_high_watermark", "0")
        await asyncio.sleep(ALARM_S)
        await self._ctl("set_vm_memory_high_watermark", "0.6")

    async def time_consumers_out(self) -> None:
        """The broker closes the channels of deliveries that are not acknowledged in time: each log
        with a reader, and each long job."""
        await self._set_consumer_timeout(_CONSUMER_TIMEOUT_MS, 300)
        await self.cut()  # it applies to new channels
        await asyncio.sleep(_TIMED_OUT_S)
        await self._set_consumer_timeout(_NO_CONSUMER_TIMEOUT_MS, _TICK_MS)
        await self.cut()

    async def cut(self) -> None:
        """Reset all connections to the broker."""
        self.workers.sever()
        self.gateways.sever()

    async def cut_workers(self) -> None:
        self.workers.sever()

    async def cut_gateways(self) -> None:
        self.gateways.sever()

    async def lose_workers_network(self) -> None:
        await _black_hole(self.workers)

    async def lose_gateways_network(self) -> None:
        await _black_hole(self.gateways)

    async def delay(self) -> None:
        """Add latency between processes and the broker for a while."""
        self.workers.delay_s = self.gateways.delay_s = _DELAY_S
        await asyncio.sleep(_DELAYED_S)
        self.workers.delay_s = self.gateways.delay_s = 0.0

    async def _set_consumer_timeout(self, timeout_ms: int, tick_ms: int) -> None:
        settings = {"consumer_timeout": timeout_ms, "channel_tick_interval": tick_ms}
        calls = (f"application:set_env(rabbit, {name}, {ms})" for name, ms in settings.items())
        await asyncio.to_thread(self.node.evaluate, ", ".join(calls))

    async def _ctl(self, *args: str) -> None:
        await asyncio.to_thread(self.node.ctl, *args)


@asynccontextmanager
async def surroundings(node: RabbitNode) -> AsyncIterator[Surroundings]:
    """The surroundings of ``node``, whose clients miss each other's heartbeats sooner than
    otherwise."""
    async with (
        TcpProxy(node.url_of("worker") + SHORT_HEARTBEAT) as workers,
        TcpProxy(node.url_of("gateway") + SHORT_HEARTBEAT) as gateways,
    ):
        yield Surroundings(node, workers, gateways)


async def _black_hole(network: TcpProxy) -> None:
    """Hold back all traffic, and deliver it too late."""
    network.stall()
    await asyncio.sleep(BLACK_HOLE_S)
    network.resume()
