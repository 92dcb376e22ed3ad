"""Bounds what batches do at once: the number of lines of one batch and model, and the memory that
the lines of all batches take."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_MAX_BYTES = 32 << 20
"""What the lines of one window take at most, so that no window takes all of the memory."""
_OWN_BYTES = 1 << 20
"""What they take without waiting for those of other windows, which may run until the end of their
batch if their model has no workers."""


class Memory:
    """Memory that windows share. A line that is larger than all of it waits until it is free."""

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self.waiting: deque[Window] = deque()
        """First come, first served."""
        self._max_bytes = max_bytes
        self._changed = asyncio.Event()

    def has_room(self, num_bytes: int) -> bool:
        return not self.num_bytes or self.num_bytes + num_bytes <= self._max_bytes

    async def wait_changed(self) -> None:
        await self._changed.wait()

    def report_change(self) -> None:
        """Wake all that wait now."""
        self._changed.set()
        self._changed.clear()


class Window:
    """The running lines of one batch and model. One line enters at a time, and any line enters an
    empty window, once there is memory for it."""

    def __init__(self, max_lines: int, memory: Memory) -> None:
        self._max_lines = max_lines
        self._memory = memory
        self._num_lines = self._num_bytes = 0

    @asynccontextmanager
    async def place(self, num_bytes: int) -> AsyncIterator[None]:
        """A place for one line, until the context ends."""
        await self.enter(num_bytes)
        try:
            yield
        finally:
            self.leave(num_bytes)

    async def enter(self, num_bytes: int) -> None:
        """Wait until there is a place for a line that takes about ``num_bytes``."""
        while not self._fits(num_bytes):
            await self._memory.wait_changed()
        self._memory.waiting.append(self)
        try:
            while not self._is_next(num_bytes):
                await self._memory.wait_changed()
            self._add(1, num_bytes)
        finally:
            self._memory.waiting.remove(self)
            self._memory.report_change()

    def leave_after(self, task: asyncio.Task[None], num_bytes: int) -> None:
        """Leave when a task is done, even if it is cancelled before it has begun."""
        task.add_done_callback(lambda _: self.leave(num_bytes))

    def leave(self, num_bytes: int) -> None:
        self._add(-1, -num_bytes)
        self._memory.report_change()

    def _fits(self, num_bytes: int) -> bool:
        is_small = self._num_bytes + num_bytes <= _MAX_BYTES
        return not self._num_lines or (self._num_lines < self._max_lines and is_small)

    def _is_next(self, num_bytes: int) -> bool:
        num_more = _num_shared(self._num_bytes + num_bytes) - _num_shared(self._num_bytes)
        is_first = self._memory.waiting[0] is self
        return not num_more or (is_first and self._memory.has_room(num_more))

    def _add(self, num_lines: int, num_bytes: int) -> None:
        self._memory.num_bytes -= _num_shared(self._num_bytes)
        self._num_lines += num_lines
        self._num_bytes += num_bytes
        self._memory.num_bytes += _num_shared(self._num_bytes)


def _num_shared(num_bytes: int) -> int:
    """How much of the bytes of a window is not its own."""
    return max(0, num_bytes - _OWN_BYTES)
