"""A worker inside the test's own event loop, with the synthetic engine."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeAlias

from bench.echo_worker import MODEL, echo_model
from shared import settings
from shared.bus.base import Bus
from shared.bus.memory import MemoryBroker
from shared.settings import WorkerSettings
from tests.support.engines.brake import Brake
from tests.support.engines.scripted_server import ScriptedEngine
from tests.support.tuning.options import split
from tests.support.workers.connections import connected
from worker.decode import served_model
from worker.decode.served_model import ServedModel
from worker.process.service import run_worker
from worker.process.tuning import WorkerTuning

_NewModel: TypeAlias = Callable[[WorkerSettings], ServedModel]


@asynccontextmanager
async def echo_worker(
    place: Bus | MemoryBroker,
    *,
    step_s: float = 0.0,
    num_blocks: int = 8192,
    numerics: str = MODEL,
    is_clock: bool = False,
    brake: Brake | None = None,
    on_stall: Callable[[], object] = lambda: None,
    **options: Any,
) -> AsyncIterator[asyncio.Event]:
    """Run a worker of the model ``echo``, at a broker with a connection of its own; yields the
    event that makes it drain.

    ``brake`` is its engine's. ``on_stall`` replaces the end of the process, which is the test's
    own.
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
        task = await _start(bus, stop, _braked(model, brake), on_stall, options)
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
    async with real_worker(place, **_at(server), **options) as stop:
        yield stop


@asynccontextmanager
async def doomed_remote_worker(
    place: Bus | MemoryBroker, server: ScriptedEngine, **options: Any
) -> AsyncIterator[None]:
    """The same, for a worker that dies without cleaning up when the ``async with`` ends."""
    async with (
        connected(place) as bus,
        _doomed(bus, served_model.load_for_worker, options | _at(server)),
    ):
        yield


def _at(server: ScriptedEngine) -> dict[str, Any]:
    return {
        "engine": server.protocol,
        "engine_url": server.url,
        "max_seq_len": server.max_seq_len,
    }


@asynccontextmanager
async def real_worker(
    place: Bus | MemoryBroker,
    on_loaded: Callable[[ServedModel], object] = lambda model: None,
    /,
    **options: Any,
) -> AsyncIterator[asyncio.Event]:
    """Run a worker of the model and engine that ``options`` name; yields the event that makes it
    drain. ``on_loaded`` is called with its model."""
    stop = asyncio.Event()

    def new_model(worker: WorkerSettings) -> ServedModel:
        model = served_model.load_for_worker(worker)
        on_loaded(model)
        return model

    async with connected(place) as bus:
        task = await _start(bus, stop, new_model, lambda: None, options)
        try:
            yield stop
        finally:
            stop.set()
            await task


@asynccontextmanager
async def counterfeit_worker(
    place: Bus | MemoryBroker, fingerprint: str, **options: Any
) -> AsyncIterator[None]:
    """The same as `real_worker`, for a worker that announces the fingerprint of another model."""
    stop = asyncio.Event()

    def new_model(worker: WorkerSettings) -> ServedModel:
        return dataclasses.replace(served_model.load_for_worker(worker), fingerprint=fingerprint)

    async with connected(place) as bus:
        task = await _start(bus, stop, new_model, lambda: None, options)
        try:
            yield
        finally:
            stop.set()
            await task


@asynccontextmanager
async def doomed_worker(
    place: Bus | MemoryBroker,
    *,
    step_s: float = 0.0,
    numerics: str = MODEL,
    brake: Brake | None = None,
    **options: Any,
) -> AsyncIterator[None]:
    """Run a worker that dies without cleaning up when the ``async with`` ends. ``brake`` is its
    engine's."""
    model = partial(echo_model, step_s=step_s, numerics=numerics)
    async with connected(place) as bus, _doomed(bus, _braked(model, brake), options):
        yield


def _braked(new_model: _NewModel, brake: Brake | None) -> _NewModel:
    return new_model if brake is None else lambda worker: brake.on_engine_of(new_model(worker))


@asynccontextmanager
async def _doomed(bus: Bus, new_model: _NewModel, options: dict[str, Any]) -> AsyncIterator[None]:
    task = await _start(bus, asyncio.Event(), new_model, lambda: None, options)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _start(
    bus: Bus,
    stop: asyncio.Event,
    new_model: _NewModel,
    on_stall: Callable[[], object],
    options: dict[str, Any],
) -> asyncio.Task[None]:
    """``options`` are settings and fields of `WorkerTuning`."""
    tuning, chosen = split(WorkerTuning, {"announce_interval_s": 0.05, **options})
    worker = settings.load(WorkerSettings, **chosen)
    model = new_model(worker)
    model.constraints.prepare()
    ready = asyncio.Event()
    task = asyncio.create_task(
        run_worker(
            worker, bus, stop=stop, ready=ready.set, model=model, on_stall=on_stall, tuning=tuning
        )
    )
    started = asyncio.create_task(ready.wait())
    await asyncio.wait([task, started], return_when=asyncio.FIRST_COMPLETED)
    started.cancel()
    return task
