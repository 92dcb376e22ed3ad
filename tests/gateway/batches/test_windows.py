import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from gateway.batches.windows import BatchMemory, Memory, Window

Leave: TypeAlias = Callable[[object], None]


def window(max_lines: int, shared: Memory) -> Window:
    """The only window of its batch."""
    return window_of(BatchMemory(shared, 1), max_lines)


def window_of(batch: BatchMemory, max_lines: int) -> Window:
    return Window(lambda: max_lines, batch)


async def turns() -> None:
    """Let all tasks go on as far as they can."""
    for _ in range(20):
        await asyncio.sleep(0)


@contextmanager
def entering(window: Window, num_bytes: int) -> Iterator[asyncio.Task[Leave]]:
    task = asyncio.create_task(window.enter(num_bytes))
    try:
        yield task
    finally:
        task.cancel()


async def fill(window: Window, num_bytes: int) -> int:
    """Let lines of this size enter until a line has to wait; returns how many could."""
    num_lines = 0
    while True:
        with entering(window, num_bytes) as line:
            await turns()
            if not line.done():
                return num_lines
        num_lines += 1


async def test_a_window_bounds_the_number_of_its_lines() -> None:
    lines = window(1, Memory(1000))
    leave = await lines.enter(1)
    with entering(lines, 1) as second:
        await turns()
        assert not second.done()

        leave(None)

        await second


async def test_the_lines_of_a_batch_take_an_eighth_and_one_more() -> None:
    lines = window(10, Memory(800))
    leave, _ = await lines.enter(60), await lines.enter(40)
    large = await lines.enter(1)
    with entering(lines, 1) as next_line, entering(lines, 1):
        await turns()
        assert not next_line.done()

        leave(None)

        await next_line
    large(None)


async def test_a_line_of_any_size_enters_whatever_others_hold() -> None:
    memory = Memory(80)
    for _ in range(32):
        await fill(window(100, memory), 1)

    others = window(10, memory)
    for _ in range(5):
        with entering(others, 200) as line:
            await turns()
            assert line.done()
            line.result()(None)


async def test_the_memory_is_bounded_however_many_windows_there_are() -> None:
    memory = Memory(10_000)

    num_lines = []
    for _ in range(32):
        batch = BatchMemory(memory, 2)
        num_lines += [await fill(window_of(batch, 9999), 10) for _ in range(2)]

    assert memory.num_bytes <= 10_000
    assert sum(num_lines) * 10 <= 10_000 + 32 * 10
    assert num_lines[0] == 63  # a sixteenth, and the large one
    assert min(num_lines[::2]) >= 1


async def test_many_stalled_batches_leave_memory_to_another_one() -> None:
    memory = Memory(64 << 20)
    for _ in range(31):
        await fill(window(9999, memory), 16 << 10)

    assert await fill(window(9999, memory), 16 << 10) >= 4


async def test_windows_of_a_batch_have_equal_shares() -> None:
    batch = BatchMemory(Memory(16_000), 2)
    stalled, other = window_of(batch, 9999), window_of(batch, 9999)
    await fill(stalled, 10)

    assert await fill(other, 10) > 80


async def test_a_line_that_no_longer_waits_holds_up_no_other() -> None:
    batch = BatchMemory(Memory(80), 2)
    first, second, third = (window_of(batch, 10) for _ in range(3))
    leave = await first.enter(20)
    with entering(third, 20) as waiting:
        with entering(second, 60):
            await turns()
        leave(None)

        await waiting


async def test_what_has_left_is_free_again() -> None:
    memory = Memory(800)
    lines = window(10, memory)

    for num_bytes in (60, 900):
        leave = await lines.enter(num_bytes)
        leave(None)

    assert memory.num_bytes == 0
    assert await fill(lines, 50) == 3
