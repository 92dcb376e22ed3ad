"""The benchmark's own client, and how it reads a stream's bytes."""

import asyncio
import time

import pytest

from bench.queue_client import ClientStream, Streams
from bench.queue_source import TOKEN_TEXT, published_at

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"


def event(num_told: int, num_tokens: int, age_s: float = 0.0) -> bytes:
    text = f"{time.monotonic() - age_s:.6f} {TOKEN_TEXT * num_tokens}"
    data = b'id: %d.9\ndata: {"choices":[{"index":0,"text":"%s"}]}\n\n' % (num_told, text.encode())
    return b"%x\r\n%s\r\n" % (len(data), data)


@pytest.mark.parametrize("piece_bytes", [1, 7, 100, 10_000])
async def test_tokens_are_counted_however_the_bytes_are_cut(piece_bytes: int) -> None:
    streams = Streams()
    stream = ClientStream(streams)
    began = time.monotonic()
    data = HEAD + event(2, 2, age_s=0.5) + event(5, 3, age_s=0.5)

    for start in range(0, len(data), piece_bytes):
        stream.data_received(data[start : start + piece_bytes])

    assert (streams.tally.num_events, streams.tally.num_tokens) == (2, 5)
    most_ms = 500 + 1e3 * (time.monotonic() - began)
    assert 499 <= streams.tally.delay_ms(50) <= most_ms + 1  # which are rounded


async def test_a_lost_event_is_an_error() -> None:
    streams = Streams()
    stream = ClientStream(streams)
    stream.data_received(HEAD + event(1, 1) + event(3, 1))

    with pytest.raises(RuntimeError, match="1 tokens between 1 and 3"):
        await streams.measure(0)


async def test_a_refused_stream_says_why() -> None:
    stream = ClientStream(Streams())
    stream.data_received(b"HTTP/1.1 404 Not Found\r\n\r\nno such model")
    stream.connection_lost(None)

    with pytest.raises(ConnectionError, match="no such model"):
        await stream.opened


async def test_a_measurement_leaves_out_what_came_before_and_after_it() -> None:
    streams = Streams()
    stream = ClientStream(streams)
    stream.data_received(HEAD + event(1, 1))
    measuring = asyncio.create_task(streams.measure(0.01))
    await asyncio.sleep(0)
    stream.data_received(event(5, 4))
    tally = await measuring
    stream.data_received(event(6, 1))

    assert tally.num_tokens == 4


def test_the_text_says_when_it_was_published() -> None:
    assert published_at(f"12.500000 {TOKEN_TEXT}") == 12.5
