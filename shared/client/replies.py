"""The reply queue of a batch, consumed across lost connections."""

import asyncio
import time
from collections.abc import Callable, Iterable

from shared import topology
from shared.bus import retry
from shared.bus.base import Bus, Delivery
from shared.bus.subscribe import Attached, Lost, Subscription
from shared.errors import BusUnavailable, QueueBusy

REPLIES_EXPIRE_S = 7 * 24 * 3600.0
_PAUSE_S = 0.1
_BUSY_TIMEOUT_S = 30.0


class Replies:
    """Answers to all jobs of a run, including answers that an earlier run left in the queue.

    An answer that was taken but not acknowledged is delivered again, in this run or the next.
    """

    def __init__(
        self, bus: Bus, run_id: str, *, prefetch: int, expires_s: float = REPLIES_EXPIRE_S
    ) -> None:
        self._bus = bus
        self._queue = topology.reply_queue(run_id, expires_s)
        self._prefetch = prefetch
        self._deliveries: asyncio.Queue[Delivery] = asyncio.Queue()

    @property
    def routing_key(self) -> str:
        """The ``reply_to`` of the run's jobs."""
        return self._queue.bindings[0].routing_key

    async def declare(self) -> None:
        """Create the queue if it does not exist. Raises `BusUnavailable`."""
        await self._bus.declare(self._queue)

    async def delete(self) -> None:
        """Delete the queue. Raises `BusUnavailable`."""
        await self._bus.delete_queue(self._queue.name)

    async def take(self) -> list[Delivery]:
        """Wait for answers; returns all that have arrived."""
        taken = [await self._deliveries.get()]
        while not self._deliveries.empty():
            taken.append(self._deliveries.get_nowait())
        return taken

    async def ack(self, deliveries: Iterable[Delivery]) -> None:
        """Acknowledge answers whose lines are on disk."""
        for delivery in deliveries:
            await delivery.ack()
            self._deliveries.task_done()

    async def caught_up(self) -> None:
        """Return once no answers are waiting, neither at the broker nor in this process."""
        while True:
            try:
                state = await self._bus.inspect(self._queue.name)
            except BusUnavailable:
                await retry.pause(self._bus, _PAUSE_S)
                continue
            if state is None or state.num_ready == 0:
                break
            await asyncio.sleep(_PAUSE_S)
        await self._deliveries.join()

    async def collect(self, on_lost: Callable[[], None]) -> None:
        """Consume the queue until cancelled. ``on_lost`` is called when the queue, and answers with
        it, were lost.

        Raises `QueueBusy` if another consumer holds the queue and does not release it in time: the
        connection of a killed run stays open until the broker misses its heartbeat.
        """
        busy_since: float | None = None
        async with Subscription(
            self._bus,
            self._queue.name,
            prefetch=self._prefetch,
            is_exclusive=True,
            declare=(self._queue,),
        ) as subscription:
            async for item in subscription:
                match item:
                    case Attached():
                        busy_since = None
                        if item.was_deleted:
                            on_lost()
                    case Lost(QueueBusy() as error):
                        busy_since = busy_since or time.monotonic()
                        if time.monotonic() - busy_since > _BUSY_TIMEOUT_S:
                            raise error
                    case Lost():
                        pass
                    case _:
                        self._deliveries.put_nowait(item)
