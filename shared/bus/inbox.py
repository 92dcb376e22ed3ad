"""The buffer between a consumer's callbacks and the code that iterates over it."""

import asyncio
from typing import Generic, TypeVar

from shared.errors import BusError

_Item = TypeVar("_Item")


class Inbox(Generic[_Item]):
    """Items in order, followed by the end of the iteration or an error. The first end wins."""

    def __init__(self) -> None:
        self.is_ended = False
        self._items: list[_Item] = []
        self._next: list[_Item] = []
        """Items ahead of the others, in reverse order."""
        self._error: BusError | None = None
        # Lists and a plain future, because every stream has an inbox: a deque takes 3/4 KiB and an
        # Event 1 KiB more.
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: _Item) -> None:
        if not self.is_ended:
            self._items.append(item)
            self._wake()

    def end(self, error: BusError | None = None) -> None:
        """End the iteration after the buffered items, or raise ``error`` there."""
        if not self.is_ended:
            self.is_ended = True
            self._error = error
            self._wake()

    def fail(self, error: BusError) -> None:
        """Drop the buffered items, which the broker will redeliver, and raise ``error``."""
        if not self.is_ended:
            self._items.clear()
            self._next.clear()
        self.end(error)

    async def get(self) -> _Item:
        """Return the next item. Raises StopAsyncIteration or the error at the end.

        Only one task may wait at a time.
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
