"""A worker that gets a job again and finds nobody who reads its log: it reads the log itself."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec

from shared import topology
from shared.bus.base import Bus, Delivery, Message
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.errors import InternalError, UndecodableMessage
from shared.log import LogReader
from shared.messages import (
    Failed,
    Finished,
    GenerationJob,
    ReplyEvent,
    SamplingParams,
    Started,
    decode_event,
)
from tests.support.engines.brake import Brake
from tests.support.workers.jobs import (
    Log,
    ask,
    new_job,
    publish,
    read,
    reading,
    reply_queue_of,
    wait_answered,
    wait_running,
)
from tests.support.workers.synthetic import doomed_worker, echo_worker

SAMPLING = SamplingParams(max_tokens=300, ignore_eos=True)
READER_GRACE_S = 3600.0
"""So long that the answer ends before, however busy the machine is."""


async def undisturbed(job: GenerationJob) -> Log:
    async with MemoryBus() as bus, echo_worker(bus):
        return await ask(bus, job)


@asynccontextmanager
async def abandoned(job: GenerationJob) -> AsyncIterator[tuple[MemoryBroker, MemoryBus]]:
    """A broker at which the worker and the reader of a job died after some tokens."""
    broker = MemoryBroker()
    async with MemoryBus(broker) as bus:
        async with doomed_worker(broker, brake=Brake(11)), reading(bus, job) as consumer:
            await publish(bus, job)
            await read(bus, job, consumer, num_tokens=10)
        yield broker, bus


async def all_events(bus: Bus, job: GenerationJob) -> list[ReplyEvent]:
    """The job's log as it is now, but for what cannot be decoded."""
    state = await bus.inspect(f"reply.{job.request_id}")
    assert state is not None
    events: list[ReplyEvent] = []
    async with reading(bus, job) as consumer:
        for _ in range(state.num_ready):
            with suppress(UndecodableMessage):
                events.append(decode_event((await anext(consumer)).message.body))
    return events


def is_asked(delivery: Delivery) -> bool:
    """Whether a worker asks the reader where to continue."""
    event = decode_event(delivery.message.body)
    return isinstance(event, Started) and event.is_waiting


async def wait_idle(bus: Bus, lane: topology.Lane = "interactive") -> None:
    """Wait until a lane of the model ``echo`` is empty, and what it had is answered."""
    async with asyncio.timeout(30):
        while (queue := await bus.inspect(topology.jobs_queue("echo", lane).name)) is not None:
            if not queue.num_ready:
                return
            await asyncio.sleep(0.01)


async def test_what_a_reader_returns_to_is_complete() -> None:
    job, brake = new_job("echo", sampling=SAMPLING), Brake(4)
    async with (
        abandoned(job) as (broker, bus),
        echo_worker(broker, brake=brake, reader_grace_s=READER_GRACE_S),
    ):
        await wait_running(bus)
        async with reading(bus, job) as consumer:
            brake.release()
            log = await read(bus, job, consumer)

    assert log.token_ids == (await undisturbed(job)).token_ids
    assert (log.reader.attempt, log.reader.num_lost_runs) == (2, 1)


async def test_the_worker_goes_on_before_any_reader_returns() -> None:
    job = new_job("echo", sampling=SAMPLING)
    async with abandoned(job) as (broker, bus):
        async with echo_worker(broker, reader_grace_s=READER_GRACE_S):
            await wait_answered(bus, 1)
        async with reading(bus, job) as consumer:
            log = await read(bus, job, consumer)

    assert isinstance(log.last, Finished)
    assert log.text == (await undisturbed(job)).text


async def test_a_reader_that_dies_before_it_answers_does_not_hold_the_job_up() -> None:
    job = new_job("echo", sampling=SAMPLING)
    async with abandoned(job) as (broker, bus):
        async with echo_worker(broker, reader_grace_s=READER_GRACE_S):
            async with reading(bus, job) as silent:
                while not is_asked(await anext(silent)):
                    pass
            await wait_answered(bus, 1)
        async with reading(bus, job) as consumer:
            log = await read(bus, job, consumer)

    assert log.token_ids == (await undisturbed(job)).token_ids


async def test_a_log_that_has_ended_costs_nothing() -> None:
    job = new_job("echo", sampling=SamplingParams(max_tokens=4, ignore_eos=True))
    again = msgspec.structs.replace(job, publication=1)
    async with MemoryBus() as bus, echo_worker(bus, max_num_seqs=1):
        await bus.declare(reply_queue_of(job))
        for one in (job, again):
            await publish(bus, one)
            await ask(bus, new_job("echo"))  # its turn comes when the one before it is done
        events = await all_events(bus, job)
        await wait_idle(bus)

    assert [type(event) for event in events[-2:]] == [Finished, Started]


async def test_a_job_whose_log_is_gone_is_dropped() -> None:
    job = new_job("echo", sampling=SAMPLING)
    async with abandoned(job) as (broker, bus):
        await bus.delete_queue(f"reply.{job.request_id}")
        async with echo_worker(broker, max_num_seqs=1):
            other = await ask(bus, new_job("echo"))
            await wait_idle(bus)

    assert isinstance(other.last, Finished)


async def test_a_log_that_cannot_be_decoded_fails_once_and_for_every_reader() -> None:
    job = new_job("echo", sampling=SAMPLING)
    later = LogReader(job.request_id, 1)
    async with abandoned(job) as (broker, bus):
        await bus.publish(topology.reply_binding(f"reply.{job.request_id}"), Message(b"\xc1"))
        async with echo_worker(broker):
            await wait_answered(bus, 1)
        await wait_idle(bus)
        events = await all_events(bus, job)
        dead = await bus.inspect(topology.DEAD_LETTERS.name)
    for event in events:
        later.read(event)

    ends = [event for event in events if isinstance(event, Finished | Failed)]
    assert [end.code for end in ends if isinstance(end, Failed)] == [InternalError.code]
    assert (len(ends), later.is_ended, len(later.chains[0].token_ids) >= 10) == (1, True, True)
    assert dead is not None
    assert dead.num_ready == 0
