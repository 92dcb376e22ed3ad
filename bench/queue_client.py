"""A client that keeps many streams open at minimal cost, with bare sockets."""

import asyncio
import itertools
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeAlias
from urllib.parse import urlsplit

from bench.figures import percentile
from bench.queue_source import MODEL, TOKEN_TEXT

_EVENT = re.compile(rb'id: (\d+)\.\d+\ndata: [^\n]*"text":"([^"]+)"')
_OPEN_AT_ONCE = 100
_OPEN_TIMEOUT_S = 120

ReadText: TypeAlias = Callable[[bytes], tuple[float, int]]
"""From the text of an event: when it was published, and the number of its tokens."""


def http_request(host: str, body: dict[str, object]) -> bytes:
    content = json.dumps(body)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\n"
        "Accept: text/event-stream\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return (head + content).encode()


@dataclass(slots=True)
class Tally:
    """The events that arrived while they were counted."""

    num_tokens: int = 0
    num_events: int = 0
    delays_s: list[float] = field(default_factory=list)
    """For each event, the time since the worker published it."""

    def count(self, published_at: float, num_tokens: int) -> None:
        self.num_events += 1
        self.num_tokens += num_tokens
        self.delays_s.append(time.monotonic() - published_at)

    def delay_ms(self, percent: float) -> float:
        return 1e3 * percentile(self.delays_s, percent)


class ClientStream(asyncio.Protocol):
    """A stream. The ids of its events count tokens; a lost or repeated token is an error."""

    def __init__(self, client: "Streams") -> None:
        loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self._client = client
        self.num_tokens = 0
        self._rest = b""

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
        if self.opened.done():
            self._client.errors.append(f"a stream ended after {self.num_tokens} tokens")
        else:
            self.opened.set_exception(exc or ConnectionError(repr(self._rest)))

    def data_received(self, data: bytes) -> None:
        data = self._rest + data
        if not self.opened.done() and data.startswith(b"HTTP/1.1 200"):
            self.opened.set_result(None)
        end = 0
        for event in _EVENT.finditer(data):
            end = event.end()
            self._take(int(event[1]), *self._client.read_text(event[2]))
        self._rest = data[end:]

    def _take(self, num_told: int, published_at: float, num_tokens: int) -> None:
        if num_told != self.num_tokens + num_tokens:
            self._client.errors.append(
                f"{num_tokens} tokens between {self.num_tokens} and {num_told}"
            )
        self.num_tokens = num_told
        self._client.tally.count(published_at, num_tokens)


def read_source(text: bytes) -> tuple[float, int]:
    """Read the text of `bench.queue_source`."""
    published_at, _, tokens = text.partition(b" ")
    return float(published_at), len(tokens) // len(TOKEN_TEXT)


class Streams:
    """Open streams, and the tally of all their events."""

    def __init__(self, read_text: ReadText = read_source) -> None:
        self.tally = Tally()
        self.errors: list[str] = []
        self.streams: list[ClientStream] = []
        """The streams that have been opened."""
        self.read_text = read_text

    async def measure(self, seconds: float) -> Tally:
        """Count the events that arrive from now on. Raises `RuntimeError` if tokens are lost or
        repeated, or a stream ends."""
        self.tally = Tally()
        await asyncio.sleep(seconds)
        tally, self.tally = self.tally, Tally()
        if self.errors:
            raise RuntimeError(f"{len(self.errors)} errors, the first: {self.errors[0]}")
        return tally


@asynccontextmanager
async def open_streams(url: str, num_streams: int) -> AsyncIterator[Streams]:
    """Open streams of `bench.queue_source` that have started; they end with the ``async with``."""
    streams = Streams()
    body = {"model": MODEL, "prompt": [1], "max_tokens": 1 << 18}
    async with opened(streams, [url], num_streams, body, timeout_s=_OPEN_TIMEOUT_S):
        yield streams


@asynccontextmanager
async def opened(
    streams: Streams,
    urls: Sequence[str],
    num_streams: int,
    body: Mapping[str, object],
    *,
    timeout_s: float,
) -> AsyncIterator[None]:
    """Open streams at the servers in turn, each of which has started; they end with the
    ``async with``. Raises `TimeoutError`."""
    transports: list[asyncio.Transport] = []
    places = asyncio.Semaphore(_OPEN_AT_ONCE)

    async def open_one(url: str) -> None:
        address = urlsplit(url)
        request = http_request(address.netloc, {**body, "stream": True})
        async with places:
            transport, stream = await asyncio.get_running_loop().create_connection(
                lambda: ClientStream(streams), address.hostname or "", address.port or 0
            )
            transports.append(transport)
            transport.write(request)
            await stream.opened
            streams.streams.append(stream)

    try:
        async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as opening:
            for url in itertools.islice(itertools.cycle(urls), num_streams):
                opening.create_task(open_one(url))
        yield
    finally:
        for transport in transports:
            transport.abort()
