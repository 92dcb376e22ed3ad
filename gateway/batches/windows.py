"""Bounds the concurrent work of batches: the number of lines of each batch and model, and the
memory that the lines of all batches take.

No batch waits for the lines of another batch, which may run until the end of their batch if their
model has no workers: however many lines run, they leave some memory to later lines, and each batch
has a slot for a line of any size.
"""

import asyncio
from collections.abc import Callable
from functools import partial

_SHARE = 8
"""A divisor: the lines of a batch take at most an eighth of the memory that others leave."""


class Memory:
    """Memory that batches share."""

    def __init__(self, max_bytes: int) -> None:
        """All lines take at most ``max_bytes`` together, besides the line of each batch that is
        larger than its window permits."""
        self.num_bytes = 0
        self.max_bytes = max_bytes
        self._changed = asyncio.Event()

    async def wait_changed(self) -> None:
        await self._changed.wait()

    def report_change(self) -> None:
        """Wake all that wait now."""
        self._changed.set()
        self._changed.clear()


class BatchMemory:
    """The share of a batch in the memory. Its windows have equal parts."""

    def __init__(self, shared: Memory, num_windows: int) -> None:
        self.shared = shared
        self.has_large_line = False
        """Whether a line runs that is larger than its window permits."""
        self._num_parts = _SHARE * num_windows

    def has_room(self, num_held: int, num_bytes: int) -> bool:
        """Whether a window that holds ``num_held`` bytes may have ``num_bytes`` more."""
        num_free = self.shared.max_bytes - self.shared.num_bytes + num_held
        return (num_held + num_bytes) * self._num_parts <= num_free


class Window:
    """The running lines of a batch and model, which enter in the order in which they came."""

    def __init__(self, max_lines: Callable[[], int], memory: BatchMemory) -> None:
        self._max_lines = max_lines
        self._memory = memory
        self._num_lines = self._num_bytes = 0
        self._turn = asyncio.Lock()
        """Of the line that enters next. Otherwise each change would wake all that wait."""

    async def enter(self, num_bytes: int) -> Callable[[object], None]:
        """Wait until there is a slot for a line that takes about ``num_bytes``. The line leaves
        when the result is called, with any argument."""
        memory = self._memory
        async with self._turn:
            while True:
                if self._num_lines < self._max_lines():
                    if memory.has_room(self._num_bytes, num_bytes):
                        self._add(1, num_bytes)
                        return partial(self._leave, num_bytes)
                    if not memory.has_large_line:
                        memory.has_large_line = True
                        self._add(1, 0)
                        return self._leave_large
                await memory.shared.wait_changed()

    def _leave(self, num_bytes: int, _: object) -> None:
        self._add(-1, -num_bytes)
        self._memory.shared.report_change()

    def _leave_large(self, _: object) -> None:
        self._memory.has_large_line = False
        self._leave(0, None)

    def _add(self, num_lines: int, num_bytes: int) -> None:
        self._num_lines += num_lines
        self._num_bytes += num_bytes
        self._memory.shared.num_bytes += num_bytes
