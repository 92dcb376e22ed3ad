"""The buffer between the reading of a log and its client."""

import asyncio
import math

from shared.errors import DeadlineExceeded, WarrenError
from shared.log import Relay


class RelayBuffer:
    """Relays in order, optionally followed by an error. One task puts, another one takes."""

    def __init__(self, deadline: float = math.inf) -> None:
        """``deadline`` is in the event loop's time."""
        self._deadline = deadline
        self.error: WarrenError | None = None
        self._relays: list[Relay] = []
        self._waiter: asyncio.Future[None] | None = None
        self._taken: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._relays)

    @property
    def is_held_up(self) -> bool:
        """Whether nothing may be put until everything is taken."""
        return self._taken is not None and not self._taken.done()

    def put(self, relay: Relay) -> None:
        self._relays.append(relay)
        self.wake()

    def fail(self, error: WarrenError) -> None:
        """End with ``error`` after the relays that are already buffered."""
        self.error = self.error or error
        self.wake()

    async def take(self, timeout_s: float | None = None) -> list[Relay]:
        """Wait for relays; returns all that have arrived, or none after ``timeout_s`` or `wake`.

        Raises the error, and `DeadlineExceeded`.
        """
        if not self._relays and self.error is None:
            await self._wait(timeout_s)
        if not self._relays and self.error is not None:
            raise self.error
        relays, self._relays = self._relays, []
        if self._taken is not None and self.is_held_up:
            self._taken.set_result(None)
        return relays

    async def let_take(self) -> None:
        """Let the taking task run."""
        for _ in range(2):
            await asyncio.sleep(0)

    async def wait_taken(self) -> None:
        """Return when everything is taken."""
        if self._relays:
            self._taken = asyncio.get_running_loop().create_future()
            await self._taken

    async def _wait(self, timeout_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        # There is one wait per token: `asyncio.timeout` would cost as much as relaying it, and an
        # Event would take 1 KiB per stream.
        self._waiter = loop.create_future()
        until = min(self._deadline, loop.time() + (timeout_s or math.inf))
        alarm = loop.call_at(until, self.wake)
        try:
            await self._waiter
        finally:
            alarm.cancel()
        if not self._relays and loop.time() >= self._deadline:
            self.fail(DeadlineExceeded("The request's deadline has passed."))

    def wake(self) -> None:
        """Make the pending `take` return what has arrived, even if that is nothing."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
