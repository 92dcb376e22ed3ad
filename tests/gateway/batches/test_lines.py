import asyncio
import time
from collections.abc import AsyncIterator

from gateway.batches.lines import input_lines


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
