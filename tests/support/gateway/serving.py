"""A gateway and a scripted worker in a thread, for clients that block."""

import asyncio
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from typing import Any

from shared import topology
from shared.bus.base import Bus
from shared.bus.memory import MemoryBroker, MemoryBus
from tests.support import PATIENCE_S
from tests.support.gateway.batches import CHATS, chat, order
from tests.support.gateway.http import LiveGateway, eventually, live_gateway
from tests.support.gateway.webhooks import FAILED, OK, receiving
from tests.support.workers.jobs import dead_letter
from tests.support.workers.scripted_worker import (
    MODEL,
    Script,
    ScriptedJob,
    ScriptedWorker,
    repeat_the_prompt,
    start_only,
    words,
)

_LOOPBACK = "127.0.0.0/8"
_ENDLESS = "endless"


async def _repeat_unless_endless(job: ScriptedJob) -> None:
    await (start_only if words(job.job.prompts[0]) == [_ENDLESS] else repeat_the_prompt)(job)


@asynccontextmanager
async def _nothing(bus: Bus, gateway: LiveGateway) -> AsyncIterator[None]:
    yield


@contextmanager
def served(
    beside: Callable[[Bus, LiveGateway], AbstractAsyncContextManager[None]] = _nothing,
    *,
    script: Script = repeat_the_prompt,
    key: str | None = None,
    **options: Any,
) -> Iterator[str]:
    """The URL of a gateway with these settings, whose worker, which it has heard of, runs
    ``script``. ``beside`` runs in the gateway's event loop as long as the gateway. ``key`` is an
    operator's, if the settings require keys."""
    is_ready = threading.Event()
    urls: list[str] = []
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        broker = MemoryBroker()
        async with (
            MemoryBus(broker) as worker_bus,
            ScriptedWorker(worker_bus, script),
            live_gateway(broker, data_dir=data_dir, **options) as gateway,
        ):
            if key is not None:
                gateway.http.headers["Authorization"] = f"Bearer {key}"

            async def is_heard() -> bool:
                return await gateway.sample("warren_fleet_workers") > 0

            await eventually(is_heard)
            async with beside(worker_bus, gateway):
                urls.append(gateway.url)
                is_ready.set()
                await stop.wait()

    def run() -> None:
        """Serve, and then end what the gateway leaves behind if its database does not answer."""
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve())

    data_dir = tempfile.mkdtemp(prefix="warren-served-")
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(run)
        serving.add_done_callback(lambda _: is_ready.set())
        try:
            assert is_ready.wait(PATIENCE_S), "the gateway did not start"
            if serving.done():
                serving.result()  # raises the reason for which it did not start
            yield urls[0]
        finally:
            with suppress(RuntimeError):  # the loop is closed if the gateway did not start
                loop.call_soon_threadsafe(stop.set)
            serving.exception()
            shutil.rmtree(data_dir)
    serving.result()


@contextmanager
def operated() -> Iterator[tuple[str, str]]:
    """The URL of a gateway that has two dead letters, a dead delivery, a stream and a batch that
    run, and a model without workers, and a URL that webhooks may have."""
    hooks: list[str] = []

    @asynccontextmanager
    async def beside(bus: Bus, gateway: LiveGateway) -> AsyncIterator[None]:
        for request_id in ("one", "two"):
            await dead_letter(bus, request_id)
        async with receiving() as receiver:
            receiver.answers = [FAILED]
            await gateway.post("/admin/v1/webhooks", url=receiver.url)
            await gateway.post("/v1/responses", model=MODEL, input="one two", background=True)

            async def is_dead() -> bool:
                dead = await gateway.http.get("/admin/v1/webhooks/dead")
                return bool(dead.json()["data"])

            await eventually(is_dead)
            receiver.answers = [OK]
            hooks.append(receiver.url)
            await bus.declare(*topology.lasting_resources("retired-model"))
            line = chat("first", _ENDLESS)
            await order(gateway, [line])
            endless = {**line["body"], "stream": True}
            async with gateway.http.stream("POST", CHATS, json=endless):
                yield

    with served(
        beside, script=_repeat_unless_endless, webhook_networks=_LOOPBACK, webhook_max_tries=1
    ) as url:
        yield url, hooks[0]
