"""What failures of AMQP calls become."""

import asyncio

import pytest

from shared.bus.rabbit.failures import translated


async def test_a_call_that_swallows_its_cancellation_is_cancelled_all_the_same() -> None:
    async def call() -> None:
        with translated("call"):
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                return  # as `asyncio.wait_for` does where the answer has just come

    task = asyncio.create_task(call())
    await asyncio.sleep(0)
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_call_in_a_task_that_was_cancelled_before_goes_through() -> None:
    """What a cancelled task does to clean up."""
    done: list[str] = []

    async def clean_up() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            with translated("clean up"):
                await asyncio.sleep(0)
            done.append("cleaned up")

    task = asyncio.create_task(clean_up())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])

    assert done == ["cleaned up"]
