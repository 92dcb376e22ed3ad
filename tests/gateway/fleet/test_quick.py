"""Quick jobs across lost connections, and the single place for quick jobs of batches."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest

from gateway.fleet.publishing import JobPublisher
from gateway.fleet.quick import QuickLane
from shared.bus.base import Binding, Message
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.errors import BusError, BusUnavailable, PublishUnconfirmed
from shared.messages import Embedded, EmbeddingJob, QuickAnswer, QuickJob, TextPrompt
from tests.support.workers.scripted_worker import MODEL, ScriptedWorker, count_words


class DelayingBus(MemoryBus):
    """Its broker is not fast, and refuses or holds up a chosen job."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker)
        self.may_publish: dict[str, asyncio.Event] = {}
        self.errors: dict[str, BusError] = {}
        """By request id."""

    async def publish(self, binding: Binding, message: Message) -> None:
        request_id = message.correlation_id
        await asyncio.sleep(0)
        if request_id in self.may_publish:
            await self.may_publish[request_id].wait()
        if request_id in self.errors:
            raise self.errors.pop(request_id)
        await super().publish(binding, message)


@pytest.fixture
async def bus(broker: MemoryBroker) -> AsyncIterator[DelayingBus]:
    async with DelayingBus(broker) as bus:
        yield bus


@pytest.fixture
async def lane(bus: MemoryBus) -> AsyncIterator[QuickLane]:
    lane = QuickLane(bus, JobPublisher(bus), retry_pause_s=0.01)
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
    asking = ask(lane, "client")
    await is_taken.wait()
    yield asking
    asking.cancel()
    with suppress(asyncio.CancelledError):
        await asking


class CountingScript:
    """A worker's answers, and how often it was asked for each."""

    def __init__(self, num_ignored: int) -> None:
        self.asked: list[str] = []
        """Request ids."""
        self.has_ignored = asyncio.Event()
        """Whether it was asked for all that it does not answer."""
        self._num_ignored = num_ignored

    def __call__(self, job: QuickJob) -> QuickAnswer | None:
        self.asked.append(job.request_id)
        if len(self.asked) == self._num_ignored:
            self.has_ignored.set()
        if len(self.asked) <= self._num_ignored:
            return None
        answer = count_words(job)
        assert isinstance(answer, Embedded)
        return answer


def ask(lane: QuickLane, request_id: str) -> "asyncio.Task[Embedded]":
    job = EmbeddingJob(
        request_id=request_id,
        model=MODEL,
        prompts=(TextPrompt(text="one"),),
        deadline=time.time() + 600,
    )
    return asyncio.create_task(lane.ask(job, Embedded))


async def run_what_is_ready() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_what_is_asked_during_an_outage_is_published_once(
    lane: QuickLane, bus: DelayingBus, worker: ScriptedWorker
) -> None:
    worker.quick_script = script = CountingScript(num_ignored=0)
    await run_what_is_ready()
    bus.sever()
    await run_what_is_ready()

    asking = ask(lane, "late")
    await asking
    await run_what_is_ready()

    assert script.asked == ["late"]


async def test_answers_are_heard_while_others_are_published_again(
    lane: QuickLane, bus: DelayingBus, worker: ScriptedWorker
) -> None:
    worker.quick_script = script = CountingScript(num_ignored=2)
    slow, fast = ask(lane, "slow"), ask(lane, "fast")
    await script.has_ignored.wait()
    bus.may_publish["slow"] = asyncio.Event()

    bus.sever()
    await fast
    bus.may_publish["slow"].set()
    await slow

    assert script.asked == ["slow", "fast", "fast", "slow"]


@pytest.mark.parametrize("error", [BusUnavailable("blocked"), PublishUnconfirmed("silent")])
async def test_what_cannot_be_published_again_at_once_is_not_lost(
    error: BusError,
    lane: QuickLane,
    bus: DelayingBus,
    worker: ScriptedWorker,
) -> None:
    worker.quick_script = script = CountingScript(num_ignored=1)
    asking = ask(lane, "client")
    await script.has_ignored.wait()
    bus.errors["client"] = error

    bus.sever()
    await asking

    assert script.asked == ["client", "client"]


async def test_a_batch_waits_for_the_jobs_of_clients(
    lane: QuickLane, asking: "asyncio.Task[Any]"
) -> None:
    order: list[str] = []

    async def embed() -> None:
        async with lane.spare_slot(MODEL):
            order.append("batch")

    embedding = asyncio.create_task(embed())
    await run_what_is_ready()
    order.append("client")
    asking.cancel()
    await embedding

    assert order == ["client", "batch"]


async def test_a_batch_does_not_wait_for_clients_of_another_model(
    lane: QuickLane, asking: "asyncio.Task[Any]"
) -> None:
    async with lane.spare_slot("another"):
        assert not asking.done()


async def test_clients_that_never_stop_do_not_starve_a_batch(
    lane: QuickLane, asking: "asyncio.Task[Any]"
) -> None:
    async with lane.spare_slot(MODEL, patience_s=0.01):
        assert not asking.done()


async def test_there_is_one_place_for_each_model(lane: QuickLane) -> None:
    num_inside = most_inside = 0

    async def embed() -> None:
        nonlocal num_inside, most_inside
        async with lane.spare_slot(MODEL):
            num_inside += 1
            most_inside = max(most_inside, num_inside)
            await run_what_is_ready()
            num_inside -= 1

    await asyncio.gather(*(embed() for _ in range(5)))

    assert most_inside == 1
