"""A gateway on a real port, inside the test's own event loop."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
from fastapi import FastAPI
from fastapi.dependencies import models as endpoints

from gateway.app import create_app
from gateway.intake.limits import Limits
from gateway.server import GatewayServer, listen, opened, url_of
from gateway.wiring import Tuning
from shared import settings, topology
from shared.bus.base import Bus, Message
from shared.bus.memory import MemoryBroker
from shared.bus.subscribe import receive
from shared.messages import AdmissionRequest, decode_usage
from shared.settings import GatewaySettings
from tests.support import PATIENCE_S
from tests.support.deployment.processes import NO_TLS
from tests.support.gateway.once.databases import data_dir, migrated
from tests.support.gateway.once.endpoints import analysed_once
from tests.support.metrics import total
from tests.support.tuning.options import split
from tests.support.workers.connections import connected

SECRET = "a secret that all gateways share"
FAST = {"port": 0, "drain_grace_s": 5, "disconnect_grace_s": 0}


@dataclass
class LiveGateway:
    """A gateway that listens at ``url``, and clients that do not retry."""

    url: str
    server: GatewayServer
    http: httpx.AsyncClient
    openai: openai.AsyncOpenAI

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def chat(self, **more: Any) -> httpx.Response:
        return await self.post("/v1/chat/completions", **chat_body(**more))

    async def sample(self, name: str) -> float:
        """The sum over all labels of a metric."""
        return total((await self.http.get("/metrics")).text, name)


@asynccontextmanager
async def live_gateway(place: Bus | MemoryBroker, /, **options: Any) -> AsyncIterator[LiveGateway]:
    """A gateway at a bus, or at a broker with a connection of its own. It has a database of its
    own, unless ``options`` say otherwise, which are settings and fields of `Tuning`."""
    tuning, options = split(Tuning, options)
    await asyncio.to_thread(migrated)
    with data_dir() as directory:
        chosen = settings.load(GatewaySettings, **{**FAST, "data_dir": directory, **options})
        with listen(chosen) as listener:
            async with connected(place) as bus, opened(_app(chosen, bus, tuning), chosen) as server:
                serving = asyncio.create_task(server.serve(sockets=[listener]))
                try:
                    # The clients close first, because a server that stops waits for open
                    # connections.
                    async with _clients(url_of(listener)) as (http, client):
                        yield LiveGateway(url_of(listener), server, http, client)
                finally:
                    server.stop()
                    await serving
    _forget_endpoints()


def _app(chosen: GatewaySettings, bus: Bus, tuning: Tuning) -> FastAPI:
    with analysed_once():
        return create_app(chosen, bus, tuning)


def _forget_endpoints() -> None:
    """Empty FastAPI's caches of facts about endpoints. They keep dozens of gateways that have
    ended, and every collection of garbage looks at all objects of each."""
    for fact in vars(endpoints).values():
        if hasattr(fact, "cache_clear"):
            fact.cache_clear()


@asynccontextmanager
async def two_gateways(
    broker: MemoryBroker, **options: Any
) -> AsyncIterator[tuple[LiveGateway, LiveGateway]]:
    """Two gateways of a deployment, with a grace period for clients that disconnect, which does not
    end during a test."""
    options = {"secret": SECRET, "disconnect_grace_s": 60, **options}
    await asyncio.to_thread(migrated)
    with data_dir() as directory:
        options = {"data_dir": directory, **options}
        async with (
            live_gateway(broker, **options) as first,
            live_gateway(broker, **options) as second,
        ):
            yield first, second


@asynccontextmanager
async def running_limits(
    limits: Limits,
    bus: Bus,
    on_request: Callable[[AdmissionRequest], None] = lambda request: None,
) -> AsyncIterator[Limits]:
    """A gateway's limits of API keys, which it shares with others, until the context ends.
    ``on_request`` is called with the requests of workers."""

    def hear(message: Message) -> None:
        fact = decode_usage(message.body)
        if isinstance(fact, AdmissionRequest):
            on_request(fact)
        else:
            limits.hear(fact)

    queue = topology.usage_queue(limits.name)
    tasks = [
        asyncio.create_task(receive(bus, queue, hear, limits.listen)),
        asyncio.create_task(limits.announce()),
    ]
    try:
        yield limits
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def _clients(url: str) -> AsyncIterator[tuple[httpx.AsyncClient, openai.AsyncOpenAI]]:
    async with (
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, verify=NO_TLS) as http,
        openai.DefaultAsyncHttpxClient(verify=NO_TLS) as for_openai,
        openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=for_openai
        ) as client,
    ):
        yield http, client


async def hears_a_worker(gateway: LiveGateway, headers: Mapping[str, str] | None = None) -> None:
    """Wait until the gateway lists a model, to a client with these headers."""

    async def is_listed() -> bool:
        return bool((await gateway.http.get("/v1/models", headers=headers)).json()["data"])

    await eventually(is_listed)


def skip(seconds: float) -> None:
    """Set the clock of the running loop forward instead of waiting: however late a busy machine is,
    no time that is to pass later has passed before."""
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds  # type: ignore[method-assign]


async def eventually(is_true: Callable[[], Awaitable[bool]]) -> None:
    """Poll until the condition holds. Raises TimeoutError if it never does."""
    async with asyncio.timeout(PATIENCE_S):
        while not await is_true():  # noqa: ASYNC110 (what is asked tells nobody of changes)
            await asyncio.sleep(0.01)


def chat_body(**more: Any) -> dict[str, Any]:
    """A small valid chat request."""
    return {
        "model": "scripted",
        "messages": [{"role": "user", "content": "one two three"}],
        **more,
    }


def events(body: str) -> list[Any]:
    """The data of a finished SSE stream: JSON, or the string that ends it."""
    data = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def text_of(body: str) -> str:
    """The text of a chat with a single choice, whose stream must have ended well."""
    *chunks, done = events(body)
    assert done == "[DONE]", done
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
