import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gateway.batches import windows
from gateway.batches.windows import Memory, Window


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "_MAX_BYTES", 100)
    monkeypatch.setattr(windows, "_OWN_BYTES", 10)


async def turns() -> None:
    """Let all tasks go on as far as they can."""
    for _ in range(20):
        await asyncio.sleep(0)


@contextmanager
def entering(window: Window, num_bytes: int) -> Iterator[asyncio.Task[None]]:
    task = asyncio.create_task(window.enter(num_bytes))
    try:
        yield task
    finally:
        task.cancel()


async def test_a_window_bounds_the_size_of_its_lines() -> None:
    window = Window(10, Memory(1000))
    await window.enter(60)
    with entering(window, 41) as third:
        await turns()
        assert not third.done()

        window.leave(60)

        await third


async def test_a_window_bounds_the_number_of_its_lines() -> None:
    window = Window(1, Memory(1000))
    await window.enter(1)
    with entering(window, 1) as second:
        await turns()
        assert not second.done()

        window.leave(1)

        await second


async def test_a_line_of_any_size_enters_an_empty_window_and_empty_memory() -> None:
    async with asyncio.timeout(10):
        await Window(10, Memory(50)).enter(200)


async def test_windows_share_memory_first_come_first_served() -> None:
    memory = Memory(50)
    first, second, third = (Window(10, memory) for _ in range(3))
    await first.enter(50)
    with entering(second, 60) as large, entering(third, 15) as small:
        await turns()
        assert not large.done()
        assert not small.done()

        first.leave(50)
        await large
        await turns()
        assert not small.done()
        second.leave(60)

        await small


async def test_what_a_window_has_of_its_own_waits_for_no_other_window() -> None:
    memory = Memory(50)
    stuck, other, waiting = (Window(10, memory) for _ in range(3))
    await stuck.enter(60)
    with entering(waiting, 60) as large:
        await turns()
        assert not large.done()

        async with asyncio.timeout(10):
            for _ in range(5):
                async with other.place(10):
                    pass


async def test_a_line_that_no_longer_waits_holds_up_no_other() -> None:
    memory = Memory(50)
    first, second, third = (Window(10, memory) for _ in range(3))
    await first.enter(40)
    with entering(third, 20) as small:
        with entering(second, 60):
            await turns()

        await small


async def test_a_task_leaves_even_if_it_is_cancelled_before_it_has_begun() -> None:
    window = Window(1, Memory(1000))
    await window.enter(1)

    task = asyncio.create_task(asyncio.sleep(60))
    window.leave_after(task, 1)
    task.cancel()

    async with asyncio.timeout(10):
        await window.enter(1)
