"""What a consumer holds for whoever iterates over it."""

import asyncio
from collections import deque
from typing import Generic, TypeVar

from shared.errors import BusError

_Item = TypeVar("_Item")


class Inbox(Generic[_Item]):
    """Items in order, then the end: nothing more, or an error. The first end counts."""

    def __init__(self) -> None:
        self._items: deque[_Item] = deque()
        self._news = asyncio.Event()
        self._is_ended = False
        self._error: BusError | None = None

    def put(self, item: _Item) -> None:
        if not self._is_ended:
            self._items.append(item)
            self._news.set()

    def end(self, error: BusError | None = None) -> None:
        """After the items that are here already, raise ``error`` or end the iteration."""
        if not self._is_ended:
            self._is_ended = True
            self._error = error
            self._news.set()

    def fail(self, error: BusError) -> None:
        """Drop the items, which the broker will deliver again, and raise ``error``."""
        if not self._is_ended:
            self._items.clear()
        self.end(error)

    async def get(self) -> _Item:
        """Return the next item. Raises StopAsyncIteration or the error at the end."""
        while not self._items:
            if self._is_ended:
                raise self._error or StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._items.popleft()
