"""An event loop whose time is virtual: instead of waiting for the next timer, it jumps to it."""

import asyncio
import selectors
from collections.abc import Mapping
from typing import Any


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Runs tasks without sleeping. Nothing outside of the process can wake it.

    Waiting for what no timer brings about raises `RuntimeError`: it would last for ever.
    """

    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._jumps.now


class _Jumps(selectors.BaseSelector):
    """A selector with files of which none is ever ready."""

    def __init__(self) -> None:
        self.now = 0.0
        self._files = selectors.SelectSelector()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("all tasks wait, and no timer is set")
        self.now += max(0.0, timeout)
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._files.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._files.unregister(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._files.get_map()

    def close(self) -> None:
        self._files.close()
