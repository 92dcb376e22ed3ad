"""The answer to a request, however its bytes arrive."""

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import aclosing
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.errors import EngineFailed, InvalidRequest
from tests.support import PATIENCE_S
from tests.support.network.connections import serving
from worker.engines.answer import EngineAway, EngineBusy, Patience, events

EVENTS: Sequence[dict[str, Any]] = [{"content": "é🦔", "tokens": [7]}, {"content": "", "n": 2}]
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
UNTIL_CLOSED = b"HTTP/1.0 200 OK\r\n\r\n"


def lines_of(events: Sequence[dict[str, Any]]) -> bytes:
    texts = [json.dumps(event, ensure_ascii=False) for event in events]
    return "".join(f": note\r\ndata: {text}\r\n\r\n" for text in texts).encode()


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(content), content)


def with_status(status: int, body: bytes = b"") -> bytes:
    return b"HTTP/1.1 %d \r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


STREAM = CHUNKED + b"".join(map(chunk, [lines_of(EVENTS[:1]), lines_of(EVENTS[1:])]))
END = chunk(b"data: [DONE]\n\n") + chunk(b"")


async def heard(
    *parts: bytes,
    silence_s: float = 60.0,
    is_closed: bool = True,
    first_after_s: float = 0.0,
    max_prompt_len: int = 0,
    others_heard_at: float = 0.0,
) -> tuple[list[Any], Exception | None]:
    """The events of an answer that arrives in parts, and the failure at its end."""
    may_close = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n{}")
        await asyncio.sleep(first_after_s)
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        if not is_closed:
            await may_close.wait()

    arrived: list[Any] = []
    patience = Patience(silence_s)
    patience.heard_at = others_heard_at
    async with serving(answer) as port:
        request = httpx.Request("POST", f"http://127.0.0.1:{port}/completion", json={})
        try:
            async with aclosing(events(request, None, patience, max_prompt_len)) as stream:
                async for some in stream:
                    arrived += some
        except (EngineFailed, EngineBusy, InvalidRequest) as failure:
            return arrived, failure
        finally:
            may_close.set()
    return arrived, None


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(cuts=st.lists(st.integers(0, len(STREAM + END)), max_size=8))
def test_events_do_not_depend_on_the_pieces_in_which_they_arrive(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(STREAM + END)]
    pieces = [(STREAM + END)[start:end] for start, end in pairwise(places)]

    assert asyncio.run(heard(*pieces)) == ([*EVENTS], None)


async def test_the_end_of_the_connection_may_be_the_end_of_the_answer() -> None:
    assert await heard(UNTIL_CLOSED, lines_of(EVENTS)) == ([*EVENTS], None)


async def test_an_answer_may_be_one_object() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 8\r\n\r\n"

    assert await heard(head + b'{"a": ', b"1}") == ([{"a": 1}], None)


@pytest.mark.parametrize(
    ("rest", "reason"),
    [
        (b"", "the connection was closed"),
        (b"no chunk\r\n", "not HTTP"),
        (chunk(b"data: {nonsense\n\n"), "not JSON"),
        (chunk(b"data: 7\n\n"), "not a JSON object"),
        (chunk(b"data: %s\n\n" % (b"[" * 100_000)), "not JSON"),
        (chunk(b'data: {"error": {"message": "out of memory"}}\n\n'), "out of memory"),
        (chunk(b'error: {"message": "out of memory"}\n\n'), "out of memory"),
    ],
)
async def test_what_arrived_before_a_failure_is_kept(rest: bytes, reason: str) -> None:
    arrived, failure = await heard(STREAM + rest)

    assert (arrived, isinstance(failure, EngineFailed)) == ([*EVENTS], True)
    assert reason in str(failure)


async def test_a_silent_stream_fails() -> None:
    _, failure = await heard(STREAM, silence_s=0.05, is_closed=False)

    assert str(failure) == "The engine's stream broke: it was silent for 0.05 s"


async def test_a_stream_may_be_silent_for_longer_while_its_prompt_is_computed() -> None:
    arrived, failure = await heard(
        STREAM + END, silence_s=0.1, first_after_s=0.3, max_prompt_len=12_000
    )

    assert (arrived, failure) == ([*EVENTS], None)


async def test_a_stream_that_has_not_begun_waits_for_streams_that_are_heard() -> None:
    arrived, failure = await heard(
        STREAM + END,
        silence_s=0.1,
        first_after_s=0.3,
        others_heard_at=time.monotonic() + PATIENCE_S,
    )

    assert (arrived, failure) == ([*EVENTS], None)


async def test_a_stream_that_never_begins_fails() -> None:
    _, failure = await heard(CHUNKED, silence_s=0.05, is_closed=False)

    assert str(failure) == "The engine's stream broke: it was silent for 0.05 s"


async def test_the_last_event_needs_no_empty_line() -> None:
    last = lines_of(EVENTS).removesuffix(b"\r\n\r\n")

    assert await heard(CHUNKED + chunk(last) + chunk(b"")) == ([*EVENTS], None)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *((status, InvalidRequest) for status in (400, 413, 422)),
        *((status, EngineBusy) for status in (429, 503)),
        *((status, EngineFailed) for status in (401, 500)),
    ],
)
async def test_a_refusal_has_its_meaning_and_its_reason(status: int, kind: type[Exception]) -> None:
    arrived, failure = await heard(with_status(status, b'{"error": {"message": "no room"}}'))

    assert (arrived, type(failure)) == ([], kind)
    assert kind is EngineBusy or "no room" in str(failure)


async def test_a_server_that_is_not_there_is_away() -> None:
    request = httpx.Request("POST", "http://127.0.0.1:1/completion", json={})

    with pytest.raises(EngineAway):
        await anext(events(request, None, Patience(60.0)))
