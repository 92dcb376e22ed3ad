"""Runs what takes long on large requests in a thread, so that the event loop goes on, and measures
how late the event loop is."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn, TypeVar

from prometheus_client import Histogram

LARGE_BYTES = 64 << 10
_THREAD = ThreadPoolExecutor(max_workers=1, thread_name_prefix="large-requests")
"""A single thread, because several would compete with the event loop for the interpreter's lock."""
_INTERVAL_S = 0.25

_Result = TypeVar("_Result")


async def off_loop(work: Callable[[], _Result], num_bytes: int) -> _Result:
    """The result of ``work`` on a request that takes so many bytes of memory. It is called in a
    thread if they are many. Raises what ``work`` raises."""
    if num_bytes < LARGE_BYTES:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_THREAD, work)


async def measure_lag(lag_s: Histogram) -> NoReturn:
    """Observe by how many seconds the event loop calls a timer too late; never returns."""
    loop = asyncio.get_running_loop()
    while True:
        due_at = loop.time() + _INTERVAL_S
        await asyncio.sleep(_INTERVAL_S)
        lag_s.observe(max(0.0, loop.time() - due_at))
