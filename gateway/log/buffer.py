"""The buffer between the reading of a log and its client."""

import asyncio
import math

from gateway.log.cursor import Item, LogEvent, Restarted
from shared.errors import DeadlineExceeded, WarrenError


class RelayBuffer:
    """Accepted events in order, optionally followed by an error. One task puts events, another task
    takes them."""

    def __init__(self, deadline: float = math.inf) -> None:
        """``deadline`` is in the event loop's time."""
        self._deadline = deadline
        self.error: WarrenError | None = None
        self.has_given_all = False
        """Whether the log's last event has been taken."""
        self._items: list[Item] = []
        self._has_given = False
        self._has_last = False
        self._waiter: asyncio.Future[None] | None = None
        self._taken: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._items)

    @property
    def is_held_up(self) -> bool:
        """Whether nothing may be put until everything is taken."""
        return self._taken is not None and not self._taken.done()

    def put(self, event: LogEvent, *, is_last: bool = False) -> None:
        self._items.append(event)
        self._has_last |= is_last
        self.wake()

    def restart(self, restarted: Restarted) -> None:
        """Drop the events that were not taken: they are put again."""
        self._items = [restarted] if self._has_given else []
        self._has_last = False

    def fail(self, error: WarrenError) -> None:
        """End with ``error`` after the events that are already buffered."""
        self.error = self.error or error
        self.wake()

    async def take(self, timeout_s: float | None = None) -> list[Item]:
        """Wait for events; returns all that have arrived, or none after ``timeout_s`` or `wake`.

        Raises the error, and `DeadlineExceeded`.
        """
        if not self._items and self.error is None:
            await self._wait(timeout_s)
        if not self._items and self.error is not None:
            raise self.error
        items, self._items = self._items, []
        self._has_given |= bool(items)
        self.has_given_all |= self._has_last
        if self._taken is not None and self.is_held_up:
            self._taken.set_result(None)
        return items

    async def let_take(self) -> None:
        """Let the taking task run."""
        for _ in range(2):
            await asyncio.sleep(0)

    async def wait_taken(self) -> None:
        """Return when everything is taken."""
        if self._items:
            self._taken = asyncio.get_running_loop().create_future()
            await self._taken

    async def _wait(self, timeout_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        # There is a wait for each token: `asyncio.timeout` would cost as much as relaying it, and
        # an Event would take 1 KiB per stream.
        self._waiter = loop.create_future()
        until = min(self._deadline, loop.time() + (timeout_s or math.inf))
        alarm = loop.call_at(until, self.wake)
        try:
            await self._waiter
        finally:
            alarm.cancel()
        if not self._items and loop.time() >= self._deadline:
            self.fail(deadline_exceeded())

    def wake(self) -> None:
        """Make the pending `take` return the events that have arrived, even if there are none."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def deadline_exceeded() -> DeadlineExceeded:
    return DeadlineExceeded("The request's deadline has passed.")
