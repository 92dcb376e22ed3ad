"""Runs what takes long on large requests in a thread, so that the event loop goes on."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

LARGE_BYTES = 64 << 10
_THREAD = ThreadPoolExecutor(max_workers=1, thread_name_prefix="large-requests")
"""One thread: several would compete with the event loop for the interpreter's lock."""

_Result = TypeVar("_Result")


async def off_loop(work: Callable[[], _Result], num_bytes: int) -> _Result:
    """The result of ``work`` on a request that takes so many bytes of memory. It is called in a
    thread if they are many. Raises what ``work`` raises."""
    if num_bytes < LARGE_BYTES:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_THREAD, work)
