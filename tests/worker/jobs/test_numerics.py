"""Streams that change hands among workers with different numerics."""

import asyncio
from contextlib import AsyncExitStack

import msgspec
import pytest

from shared import topology
from shared.bus.base import Bus, Consumer
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.messages import GenerationJob, HandedOver, SamplingParams, Started
from tests.support.engines.brake import Brake
from tests.support.workers.jobs import Log, new_job, publish, read, reading, say_started
from tests.support.workers.synthetic import doomed_worker, echo_worker
from worker.jobs.delivery import published_again

NUM_TOKENS = 300


def jobs(num: int) -> list[GenerationJob]:
    sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    return [new_job("echo", sampling=sampling) for _ in range(num)]


def numerics_of(log: Log) -> set[str]:
    """The numerics of the runs that generated the tokens."""
    found, numerics = set(), ""
    for event in log.accepted:
        if isinstance(event, Started):
            numerics = event.numerics
        else:
            found.add(numerics)
    return found


def num_started(logs: list[Log], numerics: str) -> int:
    events = [event for log in logs for event in log.raw if isinstance(event, Started)]
    return sum(event.numerics == numerics for event in events)


async def begun(broker: MemoryBroker, bus: Bus, job: GenerationJob, reader: Consumer) -> Log:
    """The log of a job whose worker, with the numerics ``a``, has died."""
    async with doomed_worker(broker, brake=Brake(6), numerics="a"):
        await publish(bus, job)
        return await read(bus, job, reader, num_tokens=5)


async def test_streams_continue_where_their_numerics_are_though_others_are_free() -> None:
    broker, brake = MemoryBroker(), Brake()
    async with MemoryBus(broker) as bus, AsyncExitStack() as stack, AsyncExitStack() as first:
        await first.enter_async_context(doomed_worker(broker, brake=brake, numerics="a"))
        asked = jobs(8)
        readers = [await stack.enter_async_context(reading(bus, job)) for job in asked]
        for job in asked:
            await publish(bus, job)
        logs = [
            await read(bus, job, reader, attempt=1)
            for job, reader in zip(asked, readers, strict=True)
        ]
        for job, reader, log in zip(asked, readers, logs, strict=True):
            await brake.allow_until(read(bus, job, reader, log, num_tokens=5))
        for numerics in ("b", "a"):
            await stack.enter_async_context(echo_worker(broker, numerics=numerics))
        await first.aclose()
        async with asyncio.timeout(60):
            logs = await asyncio.gather(
                *(read(bus, *one) for one in zip(asked, readers, logs, strict=True))
            )

    assert num_started(logs, "b") > 0
    assert [numerics_of(log) for log in logs] == [{"a"}] * len(asked)
    assert {len(log.token_ids) for log in logs} == {NUM_TOKENS}


async def test_a_stream_whose_numerics_are_gone_continues_with_others_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broker = MemoryBroker()
    (job,) = jobs(1)
    async with MemoryBus(broker) as bus, reading(bus, job) as reader:
        log = await begun(broker, bus, job, reader)
        async with echo_worker(broker, numerics="b"), asyncio.timeout(60):
            log = await read(bus, job, reader, log)

    assert (numerics_of(log), len(log.token_ids)) == ({"a", "b"}, NUM_TOKENS)
    (line,) = [record for record in caplog.records if record.message == "job taken over"]
    assert vars(line)["from_numerics"] == "a"


async def test_a_stream_waits_for_its_numerics_where_they_are_required() -> None:
    broker = MemoryBroker()
    (job,) = jobs(1)
    async with MemoryBus(broker) as bus, reading(bus, job) as reader:
        log = await begun(broker, bus, job, reader)
        async with (
            echo_worker(broker, numerics="b", require_same_numerics=True),
            asyncio.timeout(60),
        ):
            waiting = asyncio.create_task(read(bus, job, reader, log))
            while not any(isinstance(event, HandedOver) for event in log.raw):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            has_waited = not waiting.done()
            async with echo_worker(broker, numerics="a"):
                log = await waiting

    assert has_waited
    assert num_started([log], "b") > 0
    assert (numerics_of(log), len(log.token_ids)) == ({"a"}, NUM_TOKENS)


async def test_a_moved_stream_comes_back_if_nobody_takes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(topology, "_RESUMED_TTL_S", 0.5)
    broker = MemoryBroker()
    (job,) = jobs(1)
    async with MemoryBus(broker) as bus, reading(bus, job) as reader, AsyncExitStack() as first:
        await first.enter_async_context(doomed_worker(broker, brake=Brake(6), numerics="a"))
        await publish(bus, job)
        log = await read(bus, job, reader, num_tokens=5)
        async with echo_worker(broker, numerics="b"), asyncio.timeout(60):
            async with bus.consume(topology.resumed_queue("echo", "a").name) as stuck:
                await first.aclose()
                reading_on = asyncio.create_task(read(bus, job, reader, log))
                await anext(stuck)
            log = await reading_on

    assert (numerics_of(log), len(log.token_ids)) == ({"a", "b"}, NUM_TOKENS)


async def test_a_moved_stream_that_comes_back_is_newer_than_the_runs_that_had_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(topology, "_RESUMED_TTL_S", 0.5)
    broker = MemoryBroker()
    (job,) = jobs(1)
    resumed = topology.resumed_queue("echo", "a")
    async with MemoryBus(broker) as bus, reading(bus, job) as reader:
        log = await begun(broker, bus, job, reader)
        async with (
            bus.consume(topology.jobs_queue("echo", "interactive").name) as queue,
            bus.consume(resumed.name) as crashed,
        ):
            delivery = await anext(queue)
            await bus.publish(resumed.bindings[0], published_again(job, delivery.message))
            await delivery.ack()
            await anext(crashed)
        moved = msgspec.structs.replace(job, publication=1)
        await say_started(bus, moved, num_returns=1)
        async with echo_worker(broker, numerics="b"), asyncio.timeout(60):
            log = await read(bus, job, reader, log)

    assert len(log.token_ids) == NUM_TOKENS
