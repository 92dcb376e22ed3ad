"""Jobs published to the queue of a single worker, whose cache may have their prefix."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from shared import topology
from shared.bus.base import Bus, Consumer, Message
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.messages import (
    Announcement,
    GenerationJob,
    SamplingParams,
    Started,
    decode_announcement,
    encode,
)
from tests.support.engines.brake import Brake
from tests.support.workers.jobs import Log, new_job, num_ready, publish, read, reading
from tests.support.workers.synthetic import doomed_worker, echo_worker

SHARED = topology.jobs_queue("echo", "interactive").name
LONG = SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=8000, temperature=0.0, ignore_eos=True)
STEP_S = 0.005


@asynccontextmanager
async def announcements(bus: Bus) -> AsyncIterator[Consumer]:
    queue = topology.announcements_queue("test")
    await bus.declare(queue)
    async with bus.consume(queue.name) as consumer:
        yield consumer


async def announced(consumer: Consumer, *, takes_near_jobs: bool = True) -> Announcement:
    """The next announcement that says so."""
    async with asyncio.timeout(60):
        async for delivery in consumer:
            announcement = decode_announcement(delivery.message.body)
            if announcement.takes_near_jobs == takes_near_jobs:
                return announcement
    raise AssertionError("the bus is closed")


async def publish_near(bus: Bus, job: GenerationJob, worker: str) -> None:
    message = Message(
        encode(job), correlation_id=job.request_id, reply_to=f"reply.{job.request_id}"
    )
    await bus.publish(topology.near_binding(job.model, worker), message)


async def ask_near(bus: Bus, job: GenerationJob, worker: str) -> Log:
    async with reading(bus, job) as reader:
        await publish_near(bus, job, worker)
        async with asyncio.timeout(60):
            return await read(bus, job, reader)


def workers_of(log: Log) -> list[str]:
    return [event.worker for event in log.raw if isinstance(event, Started)]


async def test_a_worker_takes_what_was_published_to_it() -> None:
    broker = MemoryBroker()
    async with MemoryBus(broker) as bus, announcements(bus) as heard, echo_worker(broker):
        target = await announced(heard)
        async with echo_worker(broker):
            logs = [await ask_near(bus, new_job("echo"), target.worker) for _ in range(6)]

    assert [workers_of(log) for log in logs] == [[target.worker]] * 6


async def test_a_worker_without_a_free_slot_moves_such_a_job_to_all_workers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    broker = MemoryBroker()
    endless, job = new_job("echo", sampling=ENDLESS), new_job("echo")
    async with (
        MemoryBus(broker) as bus,
        announcements(bus) as heard,
        reading(bus, endless) as reader,
        echo_worker(broker, max_num_seqs=1, step_s=STEP_S, drain_grace_s=0.05),
    ):
        target = await announced(heard)
        await publish_near(bus, endless, target.worker)
        await read(bus, endless, reader, num_tokens=1)
        async with echo_worker(broker):
            log = await ask_near(bus, job, target.worker)

    (started,) = (event for event in log.raw if isinstance(event, Started))
    assert started.worker != target.worker
    assert not started.is_waiting
    (line,) = [record for record in caplog.records if record.message == "job moved"]
    assert (vars(line)["request_id"], vars(line)["to"]) == (job.request_id, SHARED)


async def test_a_job_whose_worker_is_gone_is_answered_by_another_one() -> None:
    broker = MemoryBroker()
    async with MemoryBus(broker) as bus, announcements(bus) as heard:
        async with doomed_worker(broker):
            target = await announced(heard)
        async with echo_worker(broker):
            log = await ask_near(bus, new_job("echo"), target.worker)

    assert log.is_ended
    assert target.worker not in workers_of(log)


async def test_a_stream_whose_worker_dies_continues_at_another_one() -> None:
    broker = MemoryBroker()
    job, undisturbed = new_job("echo", sampling=LONG), new_job("echo", sampling=LONG)
    async with MemoryBus(broker) as bus, announcements(bus) as heard, reading(bus, job) as reader:
        async with doomed_worker(broker, brake=Brake(21)):
            target = await announced(heard)
            await publish_near(bus, job, target.worker)
            log = await read(bus, job, reader, num_tokens=20)
        async with echo_worker(broker), asyncio.timeout(60):
            log = await read(bus, job, reader, log)
            async with reading(bus, undisturbed) as other:
                await publish(bus, undisturbed)
                expected = await read(bus, undisturbed, other)

    assert log.token_ids == expected.token_ids
    assert log.text == expected.text
    assert len(set(workers_of(log))) == 2


async def test_a_worker_that_drains_hands_such_a_stream_over() -> None:
    broker = MemoryBroker()
    job = new_job("echo", sampling=LONG)
    async with (
        MemoryBus(broker) as bus,
        announcements(bus) as heard,
        reading(bus, job) as reader,
        echo_worker(broker, brake=Brake(21), drain_grace_s=0.05) as stop,
    ):
        target = await announced(heard)
        await publish_near(bus, job, target.worker)
        log = await read(bus, job, reader, num_tokens=20)
        stop.set()
        leaving = await announced(heard, takes_near_jobs=False)
        async with echo_worker(broker), asyncio.timeout(60):
            log = await read(bus, job, reader, log)

    assert leaving.is_leaving
    assert (len(log.token_ids), log.reader.num_lost_runs) == (300, 0)


async def test_a_job_for_a_worker_that_drains_is_answered_by_another_one() -> None:
    broker = MemoryBroker()
    endless = new_job("echo", sampling=ENDLESS)
    async with (
        MemoryBus(broker) as bus,
        announcements(bus) as heard,
        reading(bus, endless) as reader,
        echo_worker(broker, step_s=STEP_S, drain_grace_s=1) as stop,
    ):
        target = await announced(heard)
        await publish_near(bus, endless, target.worker)
        await read(bus, endless, reader, num_tokens=1)
        stop.set()
        await announced(heard, takes_near_jobs=False)
        async with echo_worker(broker):
            log = await ask_near(bus, new_job("echo"), target.worker)

    assert log.is_ended
    assert target.worker not in workers_of(log)


async def test_an_undecodable_job_is_dead_lettered() -> None:
    broker = MemoryBroker()
    async with MemoryBus(broker) as bus, announcements(bus) as heard, echo_worker(broker):
        target = await announced(heard)
        await bus.publish(topology.near_binding("echo", target.worker), Message(b"no job"))
        while not await num_ready(bus, topology.DEAD_LETTERS.name):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        async with bus.consume(topology.DEAD_LETTERS.name) as consumer:
            assert (await anext(consumer)).message.body == b"no job"
