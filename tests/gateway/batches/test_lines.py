import asyncio
import gc
import json
import time
import tracemalloc
from codecs import BOM_UTF8
from collections.abc import AsyncIterator

import pytest

from gateway.api.bodies.schemas import ChatRequest
from gateway.api.bodies.submission import submission
from gateway.api.routes.generation import ParsedRequest
from gateway.batches.bad_lines import read_line
from gateway.batches.lines import InputLine, input_lines
from tests.support.gateway.batches import chat

SMILE = "\N{GRINNING FACE}"


async def parts_of(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def test_other_tasks_run_between_the_lines_of_a_part() -> None:
    num_turns = 0

    async def count() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    counting = asyncio.create_task(count())
    async for _ in input_lines(parts_of(b"{}\n" * 20), max_bytes=10):
        time.sleep(0.002)  # noqa: ASYNC251 (what blocks the event loop)
    counting.cancel()

    assert num_turns >= 10


@pytest.mark.parametrize("end", [b"", b"\n", b"\n{}\n"])
async def test_a_file_may_begin_with_a_byte_order_mark(end: bytes) -> None:
    lines = [line async for line in input_lines(parts_of(BOM_UTF8 + b"{}" + end), max_bytes=10)]

    assert lines[0] == InputLine(1, b"{}", start=len(BOM_UTF8))


@pytest.mark.parametrize("size", [1, 3, 100])
async def test_a_line_is_found_again_at_its_offset(size: int) -> None:
    content = BOM_UTF8 + b'{"a": 1}\n\n \r\n' + b"x" * 50 + b"\n{}\r\n{}"
    parts = parts_of(*(content[k : k + size] for k in range(0, len(content), size)))

    lines = [line async for line in input_lines(parts, max_bytes=20) if line.text is not None]

    assert [line.number for line in lines] == [1, 5, 6]
    for line in lines:
        assert line.text is not None
        assert content[line.start :].startswith(line.text)


async def test_the_event_loop_does_not_wait_for_the_size_of_a_large_line() -> None:
    measuring = asyncio.create_task(InputLine(1, b"," * 4_000_000).num_bytes())
    await asyncio.sleep(0)

    assert not measuring.done()
    assert await measuring > 4_000_000


@pytest.mark.parametrize(
    "content",
    [
        "a" * 100_000,
        "a" * 100_000 + "\N{LATIN SMALL LETTER E WITH ACUTE}",
        "\N{CJK UNIFIED IDEOGRAPH-4E2D}" * 30_000,
        "a" * 100_000 + SMILE,
        SMILE * 30_000,
        [{"type": "text", "text": "a" * 50_000 + SMILE}] * 2,
        [{"type": "text", "text": "a"}] * 4000,
    ],
    ids=["ascii", "latin-1", "cjk", "one wide character", "wide characters", "parts", "values"],
)
@pytest.mark.parametrize("is_escaped", [False, True])
async def test_no_line_takes_more_memory_than_expected(content: object, is_escaped: bool) -> None:
    line = chat("a", "")
    line["body"]["messages"][0]["content"] = content
    text = json.dumps(line, ensure_ascii=is_escaped).encode()

    def held() -> object:
        """What a line that runs holds beside its text."""
        request = ParsedRequest.of(ChatRequest, bytes(read_line(text).body))
        return request, submission(request.body, request_id="a", created_at=0.0)

    held()  # fills caches
    tracemalloc.start()
    try:
        _kept = held()
        gc.collect()
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert len(text) + num_bytes <= await InputLine(1, text).num_bytes()
