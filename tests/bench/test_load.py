"""The client, against small servers on real sockets and against a gateway."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import echo_worker as synthetic
from bench.figures import figures_of, itls_s, ttft_s
from bench.load import LoadError, Request, SseEvents, Stream, complete, random_requests, run_load
from shared.bus.memory import MemoryBus
from tests.support.gateway.http import live_gateway
from tests.support.workers.synthetic import echo_worker

REQUEST = Request([5, 6, 7], max_tokens=2)
PAUSE_S = 0.05


def _chunk(**content: object) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


GOOD = [
    b": ping\n\n",
    _chunk(choices=[{"text": "one"}], usage=None),
    _chunk(choices=[{"text": " two"}], usage=None),
    _chunk(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 2}),
    b"data: [DONE]\n\n",
]


@asynccontextmanager
async def _server(chunks: Sequence[bytes], status: str = "200 OK") -> AsyncIterator[str]:
    """Answers every request with ``chunks``, each after a pause, then closes the connection."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split()[0])
        await reader.readexactly(length)
        writer.write(f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        for chunk in chunks:
            await asyncio.sleep(PAUSE_S)
            writer.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    answers: list[asyncio.Task[None]] = []

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers.append(asyncio.create_task(answer(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await asyncio.gather(*answers)


END = b""
"""The chunk that ends a chunked body."""


async def test_a_stream_has_the_text_the_counts_and_the_times() -> None:
    async with _server([*GOOD, END]) as url:
        began = time.perf_counter()
        stream = await complete(url, REQUEST)
        took_s = time.perf_counter() - began

    assert stream.text == "one two"
    stream.check(REQUEST)
    assert ttft_s(stream) >= 2 * PAUSE_S  # the ping is no token
    [gap] = itls_s(stream)
    assert gap > 0
    assert 3 * PAUSE_S <= ttft_s(stream) + gap < took_s


@pytest.mark.parametrize(
    ("chunks", "status", "message"),
    [
        ([b'{"error": "full"}', END], "429 Too Many Requests", "status 429.*full"),
        ([*GOOD[:2], _chunk(error={"message": "worker lost"})], "200 OK", "worker lost"),
        (GOOD[:2], "200 OK", "connection was lost"),
        ([b"data: {\n\n", END], "200 OK", "JSON|truncated"),
    ],
    ids=["refused", "failed", "cut off", "garbage"],
)
async def test_what_is_no_whole_answer_raises(
    chunks: list[bytes], status: str, message: str
) -> None:
    async with _server(chunks, status) as url:
        with pytest.raises(LoadError, match=message):
            await complete(url, REQUEST)


async def test_a_load_refuses_answers_of_another_length() -> None:
    async with _server([*GOOD, END]) as url:
        with pytest.RaisesGroup(pytest.RaisesExc(LoadError, match=r"\(3, 2\) tokens")):
            await run_load(url, [Request([5, 6, 7], max_tokens=3)], num_users=1)


async def test_each_user_sends_one_request_after_another() -> None:
    async with _server([*GOOD, END]) as url:
        load = await run_load(url, [REQUEST] * 6, num_users=3)

    spans = [(stream.sent_at, stream.chunk_times[-1]) for stream in load.streams]
    in_flight = [sum(start <= at <= end for start, end in spans) for at, _ in spans]
    assert len(spans) == 6
    assert max(in_flight) == 3


async def test_it_streams_from_warren() -> None:
    requests = [
        Request(one.prompt_ids, one.max_tokens, synthetic.MODEL)
        for one in random_requests(6, seed=3, prompt_len=20, max_tokens=8)
    ]
    async with MemoryBus() as bus, echo_worker(bus), live_gateway(bus) as gateway:
        load = await run_load(gateway.url, requests, num_users=2)

    assert [stream.num_tokens for stream in load.streams] == [8] * 6
    assert figures_of(load).tokens_per_s > 0


@given(
    st.binary(min_size=1).filter(lambda data: not set(data) & set(b"\r\n\x0b\x0c\x1c\x1d\x1e\x85")),
    st.lists(st.integers(0, 60)),
)
def test_events_do_not_depend_on_how_their_bytes_are_cut(data: bytes, cuts: list[int]) -> None:
    body = b": ping\n\nid: 1\ndata: %b\n\ndata: second\n\ndata: unfinished" % data
    edges = [0, *sorted(cuts), len(body)]
    events = SseEvents()
    pieces = [body[start:end] for start, end in pairwise(edges)]

    assert [event for piece in pieces for event in events.feed(piece)] == [data, b"second"]


def test_random_requests_are_the_same_for_a_seed_and_share_nothing() -> None:
    requests = random_requests(5, seed=1)

    assert requests == random_requests(5, seed=1)
    assert len({tuple(request.prompt_ids[:2]) for request in requests}) == 5
    assert {len(request.prompt_ids) for request in requests} == {128}


def test_a_stream_without_a_chunk_is_not_one() -> None:
    with pytest.raises(LoadError):
        Stream(num_prompt_tokens=3, num_tokens=2).check(REQUEST)
