"""A call to the broker that ends when it is cancelled may return as if nothing had happened."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.log.facts import LogFacts
from gateway.log.relay import LogRelay
from gateway.log.reply_queues import ReplyLog
from shared.bus.memory import MemoryBus
from shared.bus.memory_queue import MemoryConsumer
from shared.messages import Release


class DeafBus(MemoryBus):
    """Attaches to a queue whatever is asked of it meanwhile."""

    @asynccontextmanager
    async def consume(
        self, queue: str, *, prefetch: int = 0, is_exclusive: bool = False
    ) -> AsyncIterator[MemoryConsumer]:
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            await asyncio.sleep(0)
        async with super().consume(queue, prefetch=prefetch, is_exclusive=is_exclusive) as it:
            yield it


async def test_a_relay_stops_all_the_same() -> None:
    async with DeafBus() as bus:
        log = ReplyLog(bus, "r", retention_s=60)
        await log.declare()
        relay = LogRelay(bus, log, Release(request_id="r", reader="g"), LogFacts())
        relay.start()
        await asyncio.sleep(0.01)

        async with asyncio.timeout(5):
            await relay.stop()

        async with bus.consume(log.queue.name, is_exclusive=True) as consumer:
            assert consumer.is_open
