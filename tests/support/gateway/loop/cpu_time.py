"""The CPU time of a gateway's callbacks: while a callback runs, no other client is served."""

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import pytest

_IS_MEASURED: ContextVar[bool] = ContextVar("is_measured", default=False)


@dataclass
class LoopTime:
    """The longest callback since the last `reset`."""

    longest_s: float = 0.0
    name: str = ""
    """What the longest callback was."""

    def reset(self) -> None:
        self.longest_s, self.name = 0.0, ""

    @contextmanager
    def measured(self) -> Iterator[None]:
        """What is scheduled in this context is measured, with all that it schedules itself."""
        token = _IS_MEASURED.set(True)
        try:
            yield
        finally:
            _IS_MEASURED.reset(token)


@contextmanager
def measuring(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopTime]:
    """Measure callbacks of asyncio's own event loop, without the collection of garbage, which the
    tests before have filled."""
    times, run = LoopTime(), asyncio.Handle._run

    def measured_run(handle: Any) -> None:
        if not handle._context.get(_IS_MEASURED, False):
            return run(handle)
        callback = handle._callback
        began = time.thread_time()
        run(handle)
        taken = time.thread_time() - began
        if taken > times.longest_s:
            times.longest_s, times.name = taken, repr(callback)
        return None

    monkeypatch.setattr(asyncio.Handle, "_run", measured_run)
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield times
    finally:
        gc.enable()
        gc.unfreeze()
