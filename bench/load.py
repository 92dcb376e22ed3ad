"""The client: users that each stream completions in sequence, at minimal cost.

The client shares the machine with the server that it measures, so it parses HTTP in C and uses bare
sockets. Arrival times are defined as in ``vllm bench serve``: an event counts if it contains a
choice, including a stream's last event, whose text is often empty.
"""

import asyncio
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

FIRST_ID = 1000
"""The lowest id in random prompts; lower ids are special tokens and single bytes."""
MODEL = "smollm2"
"""The model name that every server serves."""


class LoadError(Exception):
    """A server's response is not what was requested."""


@dataclass(frozen=True, slots=True)
class Request:
    prompt_ids: Sequence[int]
    max_tokens: int
    model: str = MODEL
    seed: int | None = None
    """The synthetic engine draws by it even if the temperature is 0."""

    def encode(self, host: str) -> bytes:
        """A request for a greedy, streamed completion of exactly ``max_tokens`` tokens."""
        body = {
            "model": self.model,
            "prompt": self.prompt_ids,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({} if self.seed is None else {"seed": self.seed}),
        }
        content = json.dumps(body, separators=(",", ":"))
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        return (head + content).encode()


@dataclass(slots=True)
class Stream:
    """A response as the client received it. Times are readings of `time.perf_counter`."""

    sent_at: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    text: str = ""
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    """The number of tokens that the server reports at the end of the stream."""

    def check(self, request: Request) -> None:
        """Raises `LoadError` unless both lengths are as ``request`` asks."""
        counted = (self.num_prompt_tokens, self.num_tokens)
        asked = (len(request.prompt_ids), request.max_tokens)
        if counted != asked or not self.chunk_times:
            raise LoadError(f"{counted} tokens in and out where {asked} were asked for")


@dataclass(frozen=True, slots=True)
class MeasuredLoad:
    """The streams of a setting, and how long all of them took together."""

    streams: Sequence[Stream]
    duration_s: float


def random_requests(
    num_requests: int, *, seed: int, prompt_len: int = 128, max_tokens: int = 128
) -> list[Request]:
    """Requests without common prefixes, so that no server finds a prompt in its cache."""
    draw = random.Random(seed)
    return [
        Request(draw.choices(range(FIRST_ID, 49_000), k=prompt_len), max_tokens)
        for _ in range(num_requests)
    ]


async def run_load(url: str, requests: Sequence[Request], num_users: int) -> MeasuredLoad:
    """Send all of ``requests``: each user sends the next request when its last response ends.
    Raises `LoadError`."""
    pending, streams = iter(requests), []

    async def user() -> None:
        for request in pending:
            stream = await complete(url, request)
            stream.check(request)
            streams.append(stream)

    start = time.perf_counter()
    async with asyncio.TaskGroup() as users:
        for _ in range(num_users):
            users.create_task(user())
    return MeasuredLoad(streams, time.perf_counter() - start)


async def complete(url: str, request: Request) -> Stream:
    """Stream a response over a new connection, which is opened before the clock starts."""
    stream = Stream()
    await follow(url, request, stream)
    return stream


async def follow(url: str, request: Request, stream: Stream) -> None:
    """Like `complete`, but adds to ``stream``, which the caller can observe. Raises `LoadError`."""
    address = urlsplit(url)
    transport, answer = await asyncio.get_running_loop().create_connection(
        lambda: _Answer(stream), address.hostname or "", address.port or 80
    )
    try:
        stream.sent_at = time.perf_counter()
        transport.write(request.encode(address.netloc))
        await answer.ended
    finally:
        # If this task was cancelled, nobody awaits it, and nobody hears of its error.
        if not answer.ended.cancel() and not answer.ended.cancelled():
            answer.ended.exception()
        transport.abort()


class _Answer(asyncio.Protocol):
    """Reads a streamed response; ``ended`` is done at its end, or raises `LoadError`."""

    def __init__(self, stream: Stream) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stream = stream
        self._parser = httptools.HttpResponseParser(self)
        self._events = SseEvents()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(LoadError(f"this is not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(LoadError(f"the connection was lost: {exc}"))

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        try:
            self._read(body)
        except LoadError as error:
            self._end(error)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self._end(None)

    def _read(self, body: bytes) -> None:
        if self._parser.get_status_code() != 200:
            raise LoadError(f"status {self._parser.get_status_code()}: {body.decode()}")
        for event in self._events.feed(body):
            take_event(event, self._stream)

    def _end(self, error: Exception | None) -> None:
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


class SseEvents:
    """Splits a body that arrives in pieces into the data of its events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The data of each event that is complete. Comments are skipped."""
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            for line in event.splitlines():
                if line.startswith(b"data: "):
                    yield line[6:]


class _Choice(msgspec.Struct):
    text: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(_Chunk)


def take_event(data: bytes, stream: Stream) -> None:
    """Add an event to ``stream``. Raises `LoadError` if it is an error or not a chunk."""
    if data == b"[DONE]":
        return
    try:
        chunk = _DECODER.decode(data)
    except msgspec.MsgspecError as error:
        raise LoadError(f"{error}: {data!r}") from error
    if chunk.error is not None:
        raise LoadError(str(chunk.error))
    if chunk.choices:
        stream.chunk_times.append(time.perf_counter())
        stream.text += chunk.choices[0].text or ""
    if chunk.usage is not None:
        stream.num_prompt_tokens = chunk.usage.prompt_tokens
        stream.num_tokens = chunk.usage.completion_tokens
