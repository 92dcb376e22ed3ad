"""What a consumer holds for whoever iterates over it."""

import asyncio
from typing import Generic, TypeVar

from shared.errors import BusError

_Item = TypeVar("_Item")


class Inbox(Generic[_Item]):
    """Items in order, then the end: nothing more, or an error. The first end counts."""

    def __init__(self) -> None:
        self.is_ended = False
        self._items: list[_Item] = []
        self._next: list[_Item] = []
        """Those that come before the items, the last one first."""
        self._error: BusError | None = None
        # Lists and a bare future: there is an inbox for each stream, a deque has 3/4 KiB and an
        # Event one more.
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: _Item) -> None:
        if not self.is_ended:
            self._items.append(item)
            self._wake()

    def end(self, error: BusError | None = None) -> None:
        """After the items that are here already, raise ``error`` or end the iteration."""
        if not self.is_ended:
            self.is_ended = True
            self._error = error
            self._wake()

    def fail(self, error: BusError) -> None:
        """Drop the items, which the broker will deliver again, and raise ``error``."""
        if not self.is_ended:
            self._items.clear()
            self._next.clear()
        self.end(error)

    async def get(self) -> _Item:
        """Return the next item. Raises StopAsyncIteration or the error at the end.

        One task at a time.
        """
        while not self._next:
            if self._items:
                self._next, self._items = self._items[::-1], []
            elif self.is_ended:
                raise self._error or StopAsyncIteration
            else:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
        return self._next.pop()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
