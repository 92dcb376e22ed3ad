"""The one place for quick jobs of batches."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest

from gateway.fleet.quick import QuickLane
from shared.bus.memory import MemoryBus
from shared.messages import Embedded, EmbeddingJob, TextPrompt
from tests.support.workers.scripted_worker import MODEL, ScriptedWorker


@pytest.fixture
async def lane(bus: MemoryBus) -> AsyncIterator[QuickLane]:
    lane = QuickLane(bus)
    listening = asyncio.create_task(lane.listen())
    yield lane
    listening.cancel()
    with suppress(asyncio.CancelledError):
        await listening


@pytest.fixture
async def asking(lane: QuickLane, worker: ScriptedWorker) -> "AsyncIterator[asyncio.Task[Any]]":
    """A client's job that a worker has, and does not answer."""
    is_taken = asyncio.Event()
    worker.quick_script = lambda _: is_taken.set()
    job = EmbeddingJob(
        request_id="client",
        model=MODEL,
        prompts=(TextPrompt(text="one"),),
        deadline=time.time() + 600,
    )
    asking = asyncio.create_task(lane.ask(job, Embedded))
    async with asyncio.timeout(30):
        await is_taken.wait()
    yield asking
    asking.cancel()
    with suppress(asyncio.CancelledError):
        await asking


async def run_what_is_ready() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_batch_waits_for_the_jobs_of_clients(
    lane: QuickLane, asking: "asyncio.Task[Any]"
) -> None:
    order: list[str] = []

    async def embed() -> None:
        async with lane.spare_place(MODEL):
            order.append("batch")

    embedding = asyncio.create_task(embed())
    await run_what_is_ready()
    order.append("client")
    asking.cancel()
    async with asyncio.timeout(30):
        await embedding

    assert order == ["client", "batch"]


async def test_a_batch_does_not_wait_for_clients_of_another_model(
    lane: QuickLane, asking: "asyncio.Task[Any]"
) -> None:
    async with asyncio.timeout(30), lane.spare_place("another"):
        assert not asking.done()


async def test_clients_that_never_stop_do_not_starve_a_batch(
    lane: QuickLane, asking: "asyncio.Task[Any]"
) -> None:
    async with asyncio.timeout(30), lane.spare_place(MODEL, patience_s=0.01):
        assert not asking.done()


async def test_there_is_one_place_for_each_model(lane: QuickLane) -> None:
    num_inside = most_inside = 0

    async def embed() -> None:
        nonlocal num_inside, most_inside
        async with lane.spare_place(MODEL):
            num_inside += 1
            most_inside = max(most_inside, num_inside)
            await run_what_is_ready()
            num_inside -= 1

    async with asyncio.timeout(30):
        await asyncio.gather(*(embed() for _ in range(5)))

    assert most_inside == 1
