"""Work in a thread that nobody waits for."""

import asyncio
import threading

import pytest

from worker.process.background_loading import in_daemon_thread


def test_the_result_or_the_error_arrives() -> None:
    assert asyncio.run(in_daemon_thread(lambda: 1)) == 1
    with pytest.raises(ZeroDivisionError):
        asyncio.run(in_daemon_thread(lambda: 1 // 0))


def test_the_event_loop_closes_while_cancelled_work_goes_on() -> None:
    has_begun, may_end, has_ended = (threading.Event() for _ in range(3))

    def work() -> None:
        has_begun.set()
        may_end.wait()
        has_ended.set()

    async def cancel() -> None:
        loading = asyncio.create_task(in_daemon_thread(work))
        await asyncio.to_thread(has_begun.wait)
        loading.cancel()
        await asyncio.wait([loading])

    asyncio.run(cancel())
    is_closed_first = not has_ended.is_set()
    may_end.set()

    assert is_closed_first
    assert has_ended.wait(120)
