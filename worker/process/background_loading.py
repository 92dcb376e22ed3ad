"""Loads the worker's model beside the event loop."""

import asyncio
import logging
import resource
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from shared.settings import WorkerSettings
from worker.decode import served_model
from worker.decode.served_model import ServedModel

logger = logging.getLogger(__name__)

_Loaded = TypeVar("_Loaded")
_PROGRESS_INTERVAL_S = 5.0


async def load(settings: WorkerSettings, name: str) -> ServedModel:
    """Load the model in a thread, and log every few seconds that it is being loaded."""
    began = time.monotonic()
    logger.info("loading the model", extra={"model": name, "from": settings.model})
    loading = asyncio.create_task(in_daemon_thread(lambda: served_model.load_for_worker(settings)))
    try:
        while not (await asyncio.wait([loading], timeout=_PROGRESS_INTERVAL_S))[0]:
            memory_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
            seconds = round(time.monotonic() - began)
            facts = {"model": name, "seconds": seconds, "memory_bytes": memory_bytes}
            logger.info("still loading the model", extra=facts)
    finally:
        loading.cancel()
    model = await loading
    seconds = round(time.monotonic() - began)
    logger.info("model loaded", extra={"model": name, "seconds": seconds})
    return model


async def in_daemon_thread(work: Callable[[], _Loaded]) -> _Loaded:
    """The result of ``work``. If this is cancelled, neither the event loop nor the process waits
    for its end, as they would after `asyncio.to_thread`."""
    result: Future[_Loaded] = Future()
    result.set_running_or_notify_cancel()  # it cannot be cancelled from now on

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # noqa: BLE001 (raised where it is awaited)
            result.set_exception(error)

    threading.Thread(target=run, name="loading", daemon=True).start()
    return await asyncio.wrap_future(result)
