"""Answers that outlive their deliveries: the broker gives a job back to the worker that runs it."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import msgspec
import pytest

from shared import topology
from shared.bus.base import Bus, Consumer
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.messages import GenerationJob, HandedOver, SamplingParams, Started, decode_event
from tests.support.engines.brake import Brake
from tests.support.workers.jobs import (
    LateBus,
    Log,
    ask,
    come_back,
    new_job,
    publish,
    read,
    reading,
    wait_answered,
    wait_consumers,
    wait_running,
)
from tests.support.workers.synthetic import echo_worker
from worker.jobs import consumer as consumer_module
from worker.jobs.consumer import HeldJob, JobConsumer

SAMPLING = SamplingParams(max_tokens=200, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=8000, ignore_eos=True)
JOBS = topology.jobs_queue("echo", "interactive").name


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A delivery that comes back is not given up before, however busy the machine is."""
    monkeypatch.setattr(consumer_module, "_ADOPTION_S", 60.0)


@pytest.fixture
async def may_give_up(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """The wait for lost deliveries begins when this is set, after the end of an answer, however
    busy the machine is."""
    is_set, give_up = asyncio.Event(), JobConsumer._give_up

    async def give_up_later(self: JobConsumer, lost: list[tuple[HeldJob, int]]) -> None:
        await is_set.wait()
        await give_up(self, lost)

    monkeypatch.setattr(JobConsumer, "_give_up", give_up_later)
    return is_set


async def wait_adopted(caplog: pytest.LogCaptureFixture) -> None:
    async with asyncio.timeout(60):
        while "job adopted" not in caplog.messages:  # noqa: ASYNC110 (a log tells nobody)
            await asyncio.sleep(0.01)


def num_started(log: Log) -> int:
    return sum(isinstance(event, Started) for event in log.raw)


async def undisturbed(job: GenerationJob) -> Log:
    async with MemoryBus() as bus, echo_worker(bus):
        return await ask(bus, job)


async def num_unanswered(bus: Bus, theirs: MemoryBus) -> int:
    """Jobs that come back when the worker's connection ends."""
    theirs.sever()
    state = await bus.inspect(JOBS)
    assert state is not None
    return state.num_ready


class Answering(NamedTuple):
    """A job, its reader and what that has read, the connection of the worker that runs it, and the
    brake that holds its engine."""

    job: GenerationJob
    bus: Bus
    consumer: Consumer
    log: Log
    theirs: MemoryBus
    brake: Brake


@asynccontextmanager
async def answering(num_tokens: int) -> AsyncIterator[Answering]:
    """An answer of which so many tokens are there, and no more until the brake is released."""
    job, broker = new_job("echo", sampling=SAMPLING), MemoryBroker()
    brake = Brake(num_tokens + 1)
    async with (
        MemoryBus(broker) as bus,
        MemoryBus(broker) as theirs,
        reading(bus, job) as consumer,
        echo_worker(theirs, brake=brake),
    ):
        await publish(bus, job)
        log = await read(bus, job, consumer, num_tokens=num_tokens)
        yield Answering(job, bus, consumer, log, theirs, brake)


@pytest.mark.usefixtures("_patient")
async def test_a_lost_connection_does_not_interrupt_a_stream() -> None:
    async with answering(10) as (job, bus, consumer, log, theirs, brake):
        theirs.sever()
        brake.release()
        log = await read(bus, job, consumer, log)
        await wait_answered(bus, 1)
        num_left = await num_unanswered(bus, theirs)

    assert log.token_ids == (await undisturbed(job)).token_ids
    assert (num_started(log), num_left) == (1, 0)


async def test_an_answer_that_ends_without_its_delivery_does_not_count_as_a_crash(
    may_give_up: asyncio.Event,
) -> None:
    async with (
        answering(10) as (job, bus, consumer, log, theirs, brake),
        bus.consume(JOBS) as other,
    ):
        theirs.sever()
        await anext(other)
        brake.release()
        log = await read(bus, job, consumer, log)
        message = (await anext(consumer)).message
        may_give_up.set()

    event = decode_event(message.body, message.content_type)
    assert event == HandedOver(ticket=cast("str", log.reader.ticket))


@pytest.mark.usefixtures("_patient")
async def test_an_adopted_job_has_a_line_with_its_worker(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with answering(10) as (job, bus, consumer, log, theirs, brake):
        theirs.sever()
        await wait_adopted(caplog)
        brake.release()
        await read(bus, job, consumer, log)

    (adopted,) = (vars(one) for one in caplog.records if one.message == "job adopted")
    assert (adopted["request_id"], adopted["class"]) == (job.request_id, "interactive")
    assert (adopted["worker"], adopted["attempt"]) == (log.reader.worker, 1)


@pytest.mark.usefixtures("_patient")
async def test_a_job_that_another_worker_has_had_is_not_adopted() -> None:
    async with answering(10) as (job, bus, consumer, log, theirs, brake):
        async with bus.consume(JOBS) as other:
            theirs.sever()
            await anext(other)
            await wait_consumers(bus, JOBS, 2)
        log = await read(bus, job, consumer, log, attempt=2)
        brake.release()
        log = await read(bus, job, consumer, log)

    assert log.token_ids == (await undisturbed(job)).token_ids
    assert num_started(log) == 2


@pytest.mark.parametrize("mode", ["stream", "final"])
async def test_an_answer_whose_delivery_stays_away_is_given_up(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer_module, "_ADOPTION_S", 0.05)
    job = new_job("echo", sampling=ENDLESS, mode=mode)
    broker = MemoryBroker()
    async with (
        MemoryBus(broker) as bus,
        MemoryBus(broker) as theirs,
        echo_worker(theirs, step_s=0.02, max_num_seqs=1, drain_grace_s=0.05),
        reading(bus, job) as reader,
    ):
        await publish(bus, job)
        await wait_running(bus)
        async with bus.consume(JOBS, prefetch=1) as other:
            theirs.sever()
            await anext(other)
            # The job that is given up had the only place.
            await ask(bus, new_job("echo"))
        handed_over = Log.of(job)
        while mode == "stream" and not any(isinstance(e, HandedOver) for e in handed_over.raw):
            num_tokens = len(handed_over.token_ids) + 1
            await read(bus, job, reader, handed_over, num_tokens=num_tokens)
        await bus.delete_queue(f"reply.{job.request_id}")


async def test_a_repeated_request_is_answered_although_its_first_job_had_no_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    job, broker = new_job("echo", sampling=SAMPLING), MemoryBroker()
    async with MemoryBus(broker) as bus, LateBus(broker) as late, echo_worker(late):
        await publish(bus, job)
        await late.is_missed.wait()
        async with reading(bus, job) as consumer:
            await publish(bus, job)
            await wait_adopted(caplog)
            late.may_answer.set()
            log = await read(bus, job, consumer)

    assert log.token_ids == (await undisturbed(job)).token_ids


async def test_a_publication_with_two_messages_is_answered_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    brake = Brake(11)
    job, broker = (
        msgspec.structs.replace(new_job("echo", sampling=SAMPLING), publication=1),
        MemoryBroker(),
    )
    async with (
        MemoryBus(broker) as bus,
        MemoryBus(broker) as theirs,
        reading(bus, job) as consumer,
    ):
        await bus.declare(topology.DEAD_LETTERS, topology.jobs_queue("echo", "interactive"))
        await publish(bus, job)
        await come_back(bus, job, "interactive", 5)
        async with echo_worker(theirs, brake=brake):
            log = await read(bus, job, consumer, num_tokens=10)
            await publish(bus, job)  # this message was never returned
            await wait_adopted(caplog)
            brake.release()
            log = await read(bus, job, consumer, log)
            await wait_answered(bus, 2)
            num_left = await num_unanswered(bus, theirs)

    assert log.token_ids == (await undisturbed(job)).token_ids
    assert (num_started(log), num_left) == (1, 0)


async def test_a_second_message_in_another_queue_is_settled_when_the_first_is_lost(
    may_give_up: asyncio.Event, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    brake = Brake(11)
    job = msgspec.structs.replace(new_job("echo", sampling=SAMPLING), publication=1)
    broker = MemoryBroker()
    async with (
        MemoryBus(broker) as bus,
        MemoryBus(broker) as theirs,
        reading(bus, job) as consumer,
        echo_worker(theirs, brake=brake),
    ):
        await publish(bus, job)
        log = await read(bus, job, consumer, num_tokens=10)
        await publish(bus, job, "suspect")
        await wait_adopted(caplog)
        await bus.delete_queue(JOBS)
        brake.release()
        await read(bus, job, consumer, log)
        may_give_up.set()

        async with asyncio.timeout(60):
            suspect = await ask(bus, new_job("echo"), "suspect")

    assert suspect.is_ended


async def test_a_jobs_queue_that_is_deleted_keeps_the_worker_from_nothing(
    may_give_up: asyncio.Event,
) -> None:
    async with answering(5) as (job, bus, consumer, log, _, brake):
        await bus.delete_queue(JOBS)
        brake.release()
        log = await read(bus, job, consumer, log)
        may_give_up.set()

        # A suspect runs when all others have been settled.
        async with asyncio.timeout(60):
            suspect = await ask(bus, new_job("echo"), "suspect")
            # The worker declares the queue again.
            while await bus.inspect(JOBS) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            ordinary = await ask(bus, new_job("echo"))

    assert log.is_ended
    assert suspect.token_ids == ordinary.token_ids


@pytest.mark.parametrize("is_adopted", [False, True])
def test_a_second_loss_is_waited_for_as_long_as_the_first(is_adopted: bool) -> None:
    reasons: list[str] = []
    execution: Any = SimpleNamespace(hand_over=reasons.append)
    job = new_job("echo")
    held = HeldJob(job, execution, cast("Any", SimpleNamespace(num_returns=0)))
    first = held.lose()
    if is_adopted:
        held.adopt(job, cast("Any", SimpleNamespace(num_returns=1)))
    second = held.lose()

    held.give_up(first)
    is_held = not reasons
    held.give_up(second)

    assert (is_held, reasons) == (True, ["delivery lost"])
