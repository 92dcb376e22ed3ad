"""A gateway and a scripted worker in a thread, for clients that block."""

import asyncio
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shared.bus.memory import MemoryBroker, MemoryBus
from tests.support.gateway.http import eventually, live_gateway
from tests.support.workers.scripted_worker import ScriptedWorker


@contextmanager
def served(**options: Any) -> Iterator[str]:
    """The URL of a gateway with these settings, whose worker, which it has heard of,
    repeats the prompt."""
    is_ready = threading.Event()
    urls: list[str] = []
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        broker = MemoryBroker()
        async with (
            MemoryBus(broker) as worker_bus,
            ScriptedWorker(worker_bus),
            live_gateway(broker, data_dir=data_dir, **options) as gateway,
        ):

            async def is_heard() -> bool:
                return bool((await gateway.http.get("/health")).json()["models"])

            await eventually(is_heard)
            urls.append(gateway.url)
            is_ready.set()
            await stop.wait()

    data_dir = tempfile.mkdtemp(prefix="warren-served-")
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert is_ready.wait(20), "the gateway did not start"
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
        shutil.rmtree(data_dir)
