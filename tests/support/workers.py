"""A worker inside the test's own event loop, with the synthetic engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from bench.echo_worker import echo_model
from shared import settings
from shared.bus.base import Bus
from shared.settings import WorkerSettings
from worker.service import run_worker


@asynccontextmanager
async def echo_worker(
    bus: Bus, *, step_s: float = 0.0, num_blocks: int = 8192, **options: Any
) -> AsyncIterator[asyncio.Event]:
    """Run a worker of the model ``echo``; yields the event that makes it drain."""
    worker = settings.load(WorkerSettings, **{"announce_interval_s": 0.05, **options})
    model = echo_model(worker, step_s, num_blocks)
    stop, ready = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(run_worker(worker, bus, stop=stop, ready=ready.set, model=model))
    started = asyncio.create_task(ready.wait())
    await asyncio.wait([task, started], return_when=asyncio.FIRST_COMPLETED)
    started.cancel()
    try:
        yield stop
    finally:
        stop.set()
        await task
