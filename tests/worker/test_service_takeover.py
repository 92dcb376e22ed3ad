"""Jobs that change hands: after a crash, in a drain, published twice, left by their reader."""

import asyncio

from shared import messages, topology
from shared.bus.base import Message
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.messages import Continue, Failed, Finished, SamplingParams
from tests.support.jobs import ask, new_job, publish, read, reading
from tests.support.workers import echo_worker

LONG = SamplingParams(max_tokens=2000, temperature=0.0, ignore_eos=True)


async def test_a_job_goes_on_in_another_worker_after_its_connection_broke() -> None:
    broker = MemoryBroker()
    job = new_job("echo", sampling=SamplingParams(max_tokens=60, seed=5, ignore_eos=True))
    async with MemoryBus(broker) as bus, MemoryBus(broker) as first, MemoryBus(broker) as second:
        async with echo_worker(bus):
            undisturbed = await ask(bus, job)
        async with echo_worker(first, step_s=0.005), reading(bus, job) as consumer:
            await publish(bus, job)
            log = await read(bus, job, consumer, num_tokens=10)
            async with echo_worker(second, step_s=0.005):
                first.sever()
                log = await read(bus, job, consumer, log)

    assert log.token_ids == undisturbed.token_ids
    assert log.text == undisturbed.text
    assert log.reader.attempt >= 2


async def test_draining_hands_running_jobs_over_without_a_crash() -> None:
    job = new_job("echo", sampling=SamplingParams(max_tokens=60, ignore_eos=True))
    async with MemoryBus() as bus:
        async with echo_worker(bus):
            undisturbed = await ask(bus, job)
        async with reading(bus, job) as consumer:
            async with echo_worker(bus, step_s=0.01, drain_grace_s=0.05) as stop:
                await publish(bus, job)
                log = await read(bus, job, consumer, num_tokens=5)
                stop.set()
            async with echo_worker(bus):
                log = await read(bus, job, consumer, log)

    assert log.token_ids == undisturbed.token_ids
    assert (log.reader.attempt, log.reader.num_crashes) == (2, 0)


async def test_draining_lets_short_answers_finish() -> None:
    job = new_job("echo", sampling=SamplingParams(max_tokens=20, ignore_eos=True))
    async with MemoryBus() as bus, reading(bus, job) as consumer:
        async with echo_worker(bus, step_s=0.01) as stop:
            await publish(bus, job)
            log = await read(bus, job, consumer, num_tokens=2)
            stop.set()
        log = await read(bus, job, consumer, log)

    assert log.reader.attempt == 1
    assert isinstance(log.last, Finished)


async def test_a_job_that_was_published_twice_is_answered_once() -> None:
    job = new_job("echo", sampling=SamplingParams(max_tokens=30, ignore_eos=True))
    async with MemoryBus() as bus, echo_worker(bus, step_s=0.005):
        async with reading(bus, job) as consumer:
            await publish(bus, job)
            await publish(bus, job)
            log = await read(bus, job, consumer)
        undisturbed = await ask(bus, job)

    assert log.token_ids == undisturbed.token_ids


async def test_a_continue_that_does_not_fit_the_job_is_dropped() -> None:
    job = new_job("echo", sampling=SamplingParams(max_tokens=40, ignore_eos=True))
    async with MemoryBus() as bus, echo_worker(bus, step_s=0.005):
        undisturbed = await ask(bus, job)
        async with reading(bus, job) as consumer:
            await publish(bus, job)
            log = await read(bus, job, consumer, num_tokens=3)
            wrong = Continue(
                request_id=job.request_id, ticket=str(log.reader.ticket), attempt=9, choices=()
            )
            address = topology.worker_binding(str(log.reader.worker))
            await bus.publish(address, Message(messages.encode(wrong)))
            log = await read(bus, job, consumer, log)

    assert log.token_ids == undisturbed.token_ids


async def test_an_answer_that_nobody_reads_is_cancelled_after_the_grace() -> None:
    job = new_job("echo", sampling=LONG)
    async with MemoryBus() as bus, echo_worker(bus, step_s=0.01, reader_grace_s=0.1):
        async with reading(bus, job) as consumer:
            await publish(bus, job)
            await read(bus, job, consumer, num_tokens=1)
        await asyncio.sleep(2.5)
        async with reading(bus, job) as consumer:
            log = await read(bus, job, consumer)

    assert isinstance(log.last, Failed)
    assert log.last.code == "cancelled"
