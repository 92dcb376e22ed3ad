"""A reading of a log that has another reader."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest

from gateway.log.cursor import LogCursor
from gateway.log.reading import LogReading, RelayBuffer
from gateway.log.reply_queues import ReplyLog
from shared import topology
from shared.bus import subscribe
from shared.bus.memory import MemoryBus
from shared.bus.memory_queue import MemoryConsumer
from shared.errors import QueueBusy
from shared.messages import Release

PAUSES_S = [0.01, 0.01, 0.02, 0.04, 0.08]


class BusyBus(MemoryBus):
    """Another reader has each log for a while."""

    def __init__(self, num_refused: int) -> None:
        super().__init__()
        self._num_left = num_refused
        self.is_read = asyncio.Event()
        self.asked_at: list[float] = []

    @asynccontextmanager
    async def consume(
        self, queue: str, *, prefetch: int = 0, is_exclusive: bool = False
    ) -> AsyncIterator[MemoryConsumer]:
        self.asked_at.append(asyncio.get_running_loop().time())
        if self._num_left:
            self._num_left -= 1
            raise QueueBusy("another consumer holds the queue")
        async with super().consume(queue, prefetch=prefetch, is_exclusive=is_exclusive) as it:
            self.is_read.set()
            yield it


async def reading_of(bus: MemoryBus) -> LogReading:
    """A reading of a log that has other readers."""
    await bus.declare(topology.REPLIES, topology.CONTROL)
    log = ReplyLog(bus, "r", retention_s=60)
    await log.declare()
    return LogReading(bus, log, LogCursor(Release(request_id="r"), None), RelayBuffer())


async def test_a_busy_log_is_asked_for_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscribe, "_RETRY_PAUSE_S", 0.01)
    async with BusyBus(num_refused=5) as bus:
        reading = asyncio.create_task((await reading_of(bus)).run())
        async with asyncio.timeout(30):
            await bus.is_read.wait()
        reading.cancel()
        await asyncio.wait([reading])

    pauses_s = [after - before for before, after in pairwise(bus.asked_at)]
    assert all(pause_s >= least_s for pause_s, least_s in zip(pauses_s, PAUSES_S, strict=True))
