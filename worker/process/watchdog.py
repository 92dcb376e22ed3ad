"""Ends a process that hangs, so that the broker redelivers its jobs at once."""

import asyncio
import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Self

logger = logging.getLogger(__name__)

EXIT_CODE = 70
"""EX_SOFTWARE of sysexits.h."""


def end_process() -> None:
    """Exit immediately, without cleanup; the broker notices within milliseconds."""
    if sys.__stderr__ is not None:
        faulthandler.dump_traceback(sys.__stderr__)
    for handler in logging.getLogger().handlers:
        handler.flush()
    os._exit(EXIT_CODE)


class Watchdog:
    """Calls ``on_stall`` if the engine has had work for ``timeout_s`` without completing a step, or
    if the event loop has not run for as long.

    It runs in its own thread. Time during which the whole process was suspended does not count, so
    that a resumed process gets the chance to continue.
    """

    def __init__(
        self, stalled_s: Callable[[], float], timeout_s: float, on_stall: Callable[[], object]
    ) -> None:
        """``stalled_s`` returns the seconds for which the engine has had work without completing a
        step."""
        self._stalled_s = stalled_s
        self._timeout_s = timeout_s
        self._on_stall = on_stall
        self._tick_s = min(1.0, timeout_s / 8)
        self._stopped = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._loop_seen_at = time.monotonic()

    def __enter__(self) -> Self:
        self._mark()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()

    def _mark(self) -> None:
        """Record that the event loop runs."""
        self._loop_seen_at = time.monotonic()
        if not self._stopped.is_set():
            self._loop.call_later(self._tick_s, self._mark)

    def _watch(self) -> None:
        engine_s = loop_s = 0.0
        last = time.monotonic()
        while not self._stopped.wait(self._tick_s):
            now = time.monotonic()
            elapsed_s, last = now - last, now
            counted_s = min(elapsed_s, 2 * self._tick_s)
            engine_s = engine_s + counted_s if self._stalled_s() >= elapsed_s else 0.0
            # The mark is due once per tick; it is late after a whole tick without a mark.
            is_loop_late = now - self._loop_seen_at >= elapsed_s + self._tick_s
            loop_s = loop_s + counted_s if is_loop_late else 0.0
            if max(engine_s, loop_s) >= self._timeout_s:
                what = "engine" if engine_s >= loop_s else "event loop"
                logger.critical("worker hangs", extra={"what": what, "after_s": self._timeout_s})
                self._on_stall()
                return
