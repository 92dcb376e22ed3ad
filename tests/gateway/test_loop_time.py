"""Whatever a body makes the gateway do, its event loop serves the other clients meanwhile."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import httpx
import pytest

from shared.bus.memory import MemoryBus
from tests.support.gateway.http import LiveGateway, hears_a_worker, live_gateway
from tests.support.gateway.loop.cpu_time import LoopTime, measuring
from tests.support.gateway.loop.worst_bodies import worst_bodies
from tests.support.workers.scripted_worker import MODEL, ScriptedWorker

MAX_S = 0.02
MAX_TRIES = 5
"""A busy machine makes caches cold, so it is enough that one of several tries passes."""
SIZES = {"the largest bodies": (4 << 20) - (4 << 10), "bodies for the event loop": 62_000}
"""In bytes: as large as a body may be, and just below what is handled in a thread."""
AT_EACH = frozenset({"items", "full items", "numbers"})
"""The ways in which a field is large at each endpoint. In other ways it is large at a single
endpoint, which saves time."""


class Endpoint(NamedTuple):
    path: str
    schema: Mapping[str, Any]
    example: Mapping[str, Any]


def endpoints(document: Mapping[str, Any]) -> Iterator[Endpoint]:
    """All endpoints that are given JSON, without forks. A fork has the body of the request that it
    continues, and the body is not read before that request is found."""
    for path, operations in document["paths"].items():
        if path.endswith("/fork"):
            continue
        content = operations.get("post", {}).get("requestBody", {}).get("content", {})
        if "application/json" in content:
            schema, example = (content["application/json"][key] for key in ("schema", "example"))
            model = {"model": MODEL} if "model" in schema["properties"] else {}
            yield Endpoint(path, schema, {**example, **model})


@pytest.fixture
def loop_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopTime]:
    with measuring(monkeypatch) as loop_time:
        yield loop_time


@pytest.fixture
def parsers() -> Mapping[str, str]:
    return {"tool_parser": "hermes", "reasoning_parser": "qwen3"}


@pytest.fixture
async def gateway(
    loop_time: LoopTime, bus: MemoryBus, worker: ScriptedWorker
) -> AsyncIterator[LiveGateway]:
    """A gateway whose callbacks are measured, other than the client's and the worker's."""
    async with AsyncExitStack() as stack:
        with loop_time.measured():
            gateway = await stack.enter_async_context(live_gateway(bus))
        await hears_a_worker(gateway)
        yield gateway


async def send(gateway: LiveGateway, path: str, body: bytes) -> bytes:
    """The answer to a request on a connection of its own."""
    url = httpx.URL(gateway.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(
        b"POST %b HTTP/1.1\r\nHost: warren\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(body))
    )
    writer.write(body)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    assert answer.startswith(b"HTTP/1.1 ")
    assert not answer.startswith(b"HTTP/1.1 5"), (path, answer[:1000])
    return answer


async def assert_fast(
    loop_time: LoopTime, gateway: LiveGateway, path: str, body: bytes, name: str = ""
) -> None:
    for _ in range(MAX_TRIES):
        loop_time.reset()
        await send(gateway, path, body)
        if loop_time.longest_s < MAX_S:
            return
    raise AssertionError(
        f"{path}, {name}: the event loop stood still for {loop_time.longest_s:.3f} s"
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
async def test_no_field_of_a_body_holds_up_the_event_loop(
    gateway: LiveGateway, loop_time: LoopTime, size: int
) -> None:
    document = (await gateway.http.get("/openapi.json")).json()

    for path, name, body in large_bodies(document, size):
        await assert_fast(loop_time, gateway, path, body(), name)


def large_bodies(
    document: Mapping[str, Any], size: int
) -> Iterator[tuple[str, str, Callable[[], bytes]]]:
    """The path of each endpoint, and bodies with one large part. A part that several endpoints have
    in common is large once, except in the ways that depend on the endpoint."""
    known: set[tuple[str, str]] = set()
    for path, schema, example in endpoints(document):
        known_here: set[tuple[str, str]] = set()
        for worst, body in worst_bodies(schema, example, size):
            part = (worst.place.rpartition(".")[2], worst.way)
            is_known = part in (known_here if worst.way in AT_EACH else known | known_here)
            if not is_known:
                yield path, f"{worst.place}: {worst.way}", body
            known_here.add(part)
        known |= known_here
