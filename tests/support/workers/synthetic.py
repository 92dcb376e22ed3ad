"""A worker inside the test's own event loop, with the synthetic engine."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from bench.echo_worker import MODEL, echo_model
from shared import settings
from shared.bus.base import Bus
from shared.bus.memory import MemoryBroker
from shared.settings import WorkerSettings
from tests.support.engines.scripted_server import ScriptedEngine
from tests.support.workers.connections import connected
from worker.decode import served_model
from worker.decode.served_model import ServedModel
from worker.process.service import run_worker


@asynccontextmanager
async def echo_worker(
    place: Bus | MemoryBroker,
    *,
    step_s: float = 0.0,
    num_blocks: int = 8192,
    numerics: str = MODEL,
    is_clock: bool = False,
    on_stall: Callable[[], object] = lambda: None,
    **options: Any,
) -> AsyncIterator[asyncio.Event]:
    """Run a worker of the model ``echo``, at a broker with a connection of its own; yields the
    event that makes it drain.

    ``on_stall`` replaces the end of the process, which is the test's own.
    """
    stop = asyncio.Event()
    async with connected(place) as bus:
        model = partial(
            echo_model,
            step_s=step_s,
            num_blocks=num_blocks,
            numerics=numerics,
            is_clock=is_clock,
        )
        task = await _start(bus, stop, model, on_stall, options)
        try:
            yield stop
        finally:
            stop.set()
            await task


@asynccontextmanager
async def remote_worker(
    place: Bus | MemoryBroker, server: ScriptedEngine, **options: Any
) -> AsyncIterator[asyncio.Event]:
    """Run a worker whose engine is ``server``; yields the event that makes it drain."""
    options = {
        "engine": server.protocol,
        "engine_url": server.url,
        "max_seq_len": server.max_seq_len,
        **options,
    }
    async with real_worker(place, **options) as stop:
        yield stop


@asynccontextmanager
async def real_worker(place: Bus | MemoryBroker, **options: Any) -> AsyncIterator[asyncio.Event]:
    """Run a worker of the model and engine that ``options`` name; yields the event that makes it
    drain."""
    stop = asyncio.Event()
    async with connected(place) as bus:
        task = await _start(bus, stop, served_model.load_for_worker, lambda: None, options)
        try:
            yield stop
        finally:
            stop.set()
            await task


@asynccontextmanager
async def doomed_worker(
    place: Bus | MemoryBroker, *, step_s: float = 0.0, numerics: str = MODEL, **options: Any
) -> AsyncIterator[None]:
    """Run a worker that dies without cleaning up when the ``async with`` ends."""
    async with connected(place) as bus:
        model = partial(echo_model, step_s=step_s, numerics=numerics)
        task = await _start(bus, asyncio.Event(), model, lambda: None, options)
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])


async def _start(
    bus: Bus,
    stop: asyncio.Event,
    new_model: Callable[[WorkerSettings], ServedModel],
    on_stall: Callable[[], object],
    options: dict[str, Any],
) -> asyncio.Task[None]:
    worker = settings.load(WorkerSettings, **{"announce_interval_s": 0.05, **options})
    model = new_model(worker)
    ready = asyncio.Event()
    task = asyncio.create_task(
        run_worker(worker, bus, stop=stop, ready=ready.set, model=model, on_stall=on_stall)
    )
    started = asyncio.create_task(ready.wait())
    await asyncio.wait([task, started], return_when=asyncio.FIRST_COMPLETED)
    started.cancel()
    return task
