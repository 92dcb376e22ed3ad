"""A consumer of jobs on a bus that comes and goes."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import ClassVar, Self, cast

import msgspec
import pytest

from shared import topology
from shared.bus.base import Message
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.bus.subscribe import Subscription
from shared.messages import Ended, SamplingParams, decode_usage
from shared.topology import Publishers
from tests.support.engines.brake import Brake
from tests.support.workers.jobs import (
    ask,
    new_job,
    num_ready,
    publish,
    read,
    reading,
    wait_consumers,
)
from tests.support.workers.synthetic import echo_worker
from worker.jobs import consumer as consumer_module
from worker.jobs.admission import TenantAdmission
from worker.jobs.consumer import HeldJobs, JobConsumer
from worker.jobs.metrics import JobMetrics
from worker.jobs.runner import JobRunner
from worker.jobs.window import JobWindow

QUEUE = topology.jobs_queue("echo", "interactive")


class Endless:
    """A run that does not end."""

    async def run(self) -> None:
        await asyncio.Event().wait()


def endless(*_: object) -> JobRunner:
    return cast("JobRunner", Endless())


@asynccontextmanager
async def consuming(bus: MemoryBus) -> AsyncIterator[tuple[JobConsumer, "asyncio.Task[None]"]]:
    consumer = JobConsumer(
        bus,
        "echo",
        QUEUE,
        overflow=None,
        worker="worker.echo",
        prefetch=1,
        window=JobWindow(1, {}),
        held=HeldJobs(),
        publishers=Publishers(("gateway",)),
        tenants=TenantAdmission(bus, "worker.echo", JobMetrics("echo", 0), job_timeout_s=60),
        new_runner=endless,
        metrics=JobMetrics("echo", 0),
    )
    running = asyncio.create_task(consumer.run())
    await asyncio.sleep(0.01)
    try:
        yield consumer, running
    finally:
        running.cancel()
        await asyncio.wait([running])


async def num_consumers(bus: MemoryBus) -> int:
    state = await bus.inspect(QUEUE.name)
    assert state is not None
    return state.num_consumers


@pytest.mark.parametrize("is_paused", [False, True])
async def test_a_stopped_consumer_ends(is_paused: bool) -> None:
    async with MemoryBus() as bus, consuming(bus) as (consumer, running):
        if is_paused:
            await consumer.pause()
            await asyncio.sleep(0.01)
        await consumer.stop()
        await running
        assert await num_consumers(bus) == 0


async def test_a_consumer_is_stopped_without_a_broker() -> None:
    async with consuming(MemoryBus()) as (consumer, running):
        await consumer.stop()
        await running


async def test_a_paused_consumer_takes_nothing_until_it_resumes() -> None:
    async with MemoryBus() as bus, consuming(bus) as (consumer, _):
        nums = [await num_consumers(bus)]
        await consumer.pause()
        bus.sever()
        await bus.wait_connected()
        await asyncio.sleep(0.1)
        nums.append(await num_consumers(bus))
        consumer.resume()
        await wait_consumers(bus, QUEUE.name, 1)

    assert nums == [1, 0]


class NotedSubscription(Subscription):
    """Notes the subscriptions that wait to be closed, in the order in which they were stopped."""

    stopped: ClassVar[list[Subscription]] = []
    closed: ClassVar[list[Subscription]] = []

    async def __aenter__(self) -> Self:
        self.stopped.append(self)
        await super().__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await super().__aexit__(*exc_info)
        self.closed.append(self)


async def test_a_long_job_keeps_open_its_own_subscription_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(consumer_module, "Subscription", NotedSubscription)
    monkeypatch.setattr(NotedSubscription, "stopped", [])
    monkeypatch.setattr(NotedSubscription, "closed", [])
    async with MemoryBus(user="gateway") as bus, consuming(bus) as (consumer, _):
        await publish(bus, new_job("echo"))
        while not consumer.window.is_full:  # noqa: ASYNC110 (nobody says when)
            await asyncio.sleep(0.01)
        for _ in range(4):
            await wait_consumers(bus, QUEUE.name, 1)
            await consumer.pause()
            await wait_consumers(bus, QUEUE.name, 0)
            consumer.resume()
        while len(NotedSubscription.closed) < 3:  # noqa: ASYNC110 (nobody says when)
            await asyncio.sleep(0.01)
        first, *others = NotedSubscription.stopped
        closed = list(NotedSubscription.closed)

    assert first not in closed
    assert closed == others


async def test_a_consumer_that_has_room_takes_jobs_but_begins_none_early_beside_free_workers() -> (
    None
):
    async with MemoryBus() as bus, consuming(bus) as (consumer, _):
        num_given = await consumer.yield_to_peers(num_free=3)
        yielded, was_taking = consumer.window.yields, consumer.is_taking

        await consumer.yield_to_peers(num_free=0)

    assert (num_given, yielded, was_taking) == (0, True, True)
    assert not consumer.window.yields


@pytest.mark.parametrize("mark", ["", "is_detached", "is_counted"])
async def test_the_end_of_a_detached_or_counted_job_is_sent_to_all_gateways(mark: str) -> None:
    broker, told = MemoryBroker(), topology.usage_queue("g")
    job = msgspec.structs.replace(new_job("echo"), **({mark: True} if mark else {}))
    async with MemoryBus(broker) as bus, echo_worker(broker):
        await bus.declare(told)
        await ask(bus, job)
        await ask(
            bus, msgspec.structs.replace(new_job("echo"), request_id="last", is_detached=True)
        )
        async with bus.consume(told.name) as consumer:
            first = decode_usage((await anext(consumer)).message.body)

    assert isinstance(first, Ended)
    assert first.request_id == (job.request_id if mark else "last")
    assert first.num_tokens is not None
    assert first.num_tokens > 8


async def test_a_run_that_a_newer_one_replaces_does_not_end_a_detached_job(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    broker, told, brake = MemoryBroker(), topology.usage_queue("g"), Brake(6)
    sampling = SamplingParams(max_tokens=100, ignore_eos=True)
    job = msgspec.structs.replace(new_job("echo", sampling=sampling), is_detached=True)
    async with MemoryBus(broker) as bus, reading(bus, job) as reader:
        await bus.declare(told)
        async with echo_worker(broker, brake=brake):
            await publish(bus, job)
            log = await read(bus, job, reader, num_tokens=5)
            await publish(bus, msgspec.structs.replace(job, publication=1))
            log = await read(bus, job, reader, log, attempt=2)
            brake.release()
            await read(bus, job, reader, log)
        num_told = await num_ready(bus, told.name)
        async with bus.consume(told.name) as consumer:
            ended = decode_usage((await anext(consumer)).message.body)

    lines = [vars(one) for one in caplog.records if one.message == "job ended"]
    assert [line["outcome"] for line in lines] == ["superseded", "completed"]
    assert isinstance(ended, Ended)
    assert (num_told, (ended.num_tokens or 0) > 100) == (1, True)


async def test_the_end_of_a_gateways_job_that_cannot_be_decoded_is_sent_to_all_gateways() -> None:
    broker, told = MemoryBroker(), topology.usage_queue("g")
    async with MemoryBus(broker, user="gateway") as bus, echo_worker(broker):
        await bus.declare(told)
        (binding,) = QUEUE.bindings
        message = Message(b"?", correlation_id="refused", reply_to="reply.refused")
        await bus.publish(binding, message)
        async with bus.consume(told.name) as consumer:
            ended = decode_usage((await anext(consumer)).message.body)

    assert ended == Ended(request_id="refused", num_tokens=0)


async def test_a_worker_declares_its_deleted_queues_again() -> None:
    broker = MemoryBroker()
    async with MemoryBus(broker) as bus, echo_worker(broker):
        expected = await ask(bus, new_job("echo"))
        await bus.delete_queue(QUEUE.name)
        while await bus.inspect(QUEUE.name) is None:  # noqa: ASYNC110 (nobody says when)
            await asyncio.sleep(0.01)
        log = await ask(bus, new_job("echo"))

    assert log.token_ids == expected.token_ids
