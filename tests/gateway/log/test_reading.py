"""A reading of a log: how it attaches, and how it ends."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest

from gateway.log.buffer import RelayBuffer
from gateway.log.cursor import LogCursor
from gateway.log.reading import LogReading
from gateway.log.reply_queues import ReplyLog
from shared import topology
from shared.bus import subscribe
from shared.bus.memory import MemoryBus
from shared.bus.memory_queue import MemoryConsumer
from shared.errors import BusUnavailable, QueueBusy
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


class DeletingBus(MemoryBus):
    """Takes its time to delete a queue, and fails the first times."""

    def __init__(self, num_failures: int) -> None:
        super().__init__()
        self._num_failures = num_failures
        self.num_deletions = 0

    async def delete_queue(self, name: str) -> None:
        self.num_deletions += 1
        await asyncio.sleep(0)
        if self.num_deletions <= self._num_failures:
            raise BusUnavailable("the connection was lost")
        await super().delete_queue(name)


async def reading_of(bus: MemoryBus) -> LogReading:
    """A reading of a log that may have other readers."""
    await bus.declare(topology.REPLIES, topology.CONTROL)
    log = ReplyLog(bus, "r", retention_s=60)
    await log.declare()
    return LogReading(bus, log, LogCursor(Release(request_id="r"), None), RelayBuffer())


async def test_a_busy_log_is_asked_for_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscribe, "_RETRY_PAUSE_S", 0.01)
    async with BusyBus(num_refused=5) as bus:
        reading = asyncio.create_task((await reading_of(bus)).run())
        await bus.is_read.wait()
        reading.cancel()
        await asyncio.wait([reading])

    pauses_s = [after - before for before, after in pairwise(bus.asked_at)]
    assert all(pause_s >= least_s for pause_s, least_s in zip(pauses_s, PAUSES_S, strict=True))


@pytest.mark.parametrize("num_failures", [0, 1])
async def test_a_log_is_deleted_once_however_many_end_it(num_failures: int) -> None:
    async with DeletingBus(num_failures) as bus:
        reading = await reading_of(bus)

        errors = await asyncio.gather(*(reading.end() for _ in range(3)), return_exceptions=True)

    assert [type(error) for error in errors if error] == [BusUnavailable] * num_failures
    assert bus.num_deletions == num_failures + 1
