"""The clock of an event loop, which a test sets forward instead of waiting: however late a busy
machine is, no time that is to pass later has passed before."""

import asyncio


def skip(seconds: float) -> None:
    """Set the clock of the running loop forward, which is the test's own."""
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds  # type: ignore[method-assign]
