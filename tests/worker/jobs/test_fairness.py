"""Workers serve tenants in turn and leave waiting jobs to workers that are free."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from msgspec.structs import replace

from shared import topology
from shared.bus.base import Bus
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.messages import Finished, GenerationJob, SamplingParams, Started
from tests.support.engines.brake import Brake
from tests.support.workers.jobs import (
    Log,
    ask,
    new_job,
    num_ready,
    publish,
    read,
    reading,
    wait_announced,
)
from tests.support.workers.synthetic import echo_worker

QUEUE = topology.jobs_queue("echo", "interactive").name
OVERFLOW = topology.jobs_queue("echo", "overflow").name
STEP_S = 0.005
LONG = SamplingParams(max_tokens=4000, temperature=0.0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def jobs(tenant: str, num_jobs: int, sampling: SamplingParams = LONG) -> list[GenerationJob]:
    return [replace(new_job("echo", sampling=sampling), tenant=tenant) for _ in range(num_jobs)]


@asynccontextmanager
async def asking(bus: Bus, flood: Sequence[GenerationJob]) -> AsyncIterator[set[asyncio.Task[Log]]]:
    """Publish jobs in sequence, and read their answers until the end of the ``with``."""
    tasks = set()
    for job in flood:
        tasks.add(asyncio.create_task(ask(bus, job)))
        await asyncio.sleep(0)
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def until_taken(bus: Bus) -> None:
    while await num_ready(bus, QUEUE):  # noqa: ASYNC110 (nobody says when)
        await asyncio.sleep(0.01)


def is_answered(log: Log) -> bool:
    return isinstance(log.last, Finished) and len(log.token_ids) == SHORT.max_tokens


async def test_a_flood_of_one_tenant_does_not_delay_the_job_of_another() -> None:
    options: dict[str, Any] = {"step_s": STEP_S, "max_num_seqs": 2, "drain_grace_s": 0.05}
    async with MemoryBus() as bus, echo_worker(bus, **options):
        [alone] = [await ask(bus, job) for job in jobs("single", 1, SHORT)]
        async with asking(bus, jobs("flood", 40)) as flood:
            await until_taken(bus)
            [log] = [await ask(bus, job) for job in jobs("single", 1, SHORT)]
            num_answered = sum(task.done() for task in flood)

    assert is_answered(log)
    assert log.token_ids == alone.token_ids
    assert num_answered == 0


async def test_a_flood_that_no_window_holds_does_not_delay_the_job_of_another() -> None:
    options: dict[str, Any] = {"step_s": STEP_S, "max_num_seqs": 2, "max_waiting_jobs": 8}
    async with (
        MemoryBus() as bus,
        echo_worker(bus, **options, drain_grace_s=0.05),
        asking(bus, jobs("flood", 100)) as flood,
    ):
        await until_taken(bus)
        num_aside = await num_ready(bus, OVERFLOW)
        [log] = [await ask(bus, job) for job in jobs("single", 1, SHORT)]
        num_answered = sum(task.done() for task in flood)

    assert num_aside >= 100 - 2 - 8 - 4
    assert is_answered(log)
    assert num_answered == 0


async def test_a_flood_over_amqp_does_not_delay_the_jobs_of_others() -> None:
    """Its jobs claim another tenant each, and belong to their publisher all the same."""
    broker = MemoryBroker()
    options: dict[str, Any] = {"step_s": STEP_S, "max_num_seqs": 2, "drain_grace_s": 0.05}
    waiting = [
        replace(job, request_id=f"mallory.{number}", tenant=f"tenant-{number}")
        for number, job in enumerate(jobs("", 40))
    ]
    [of_alice, of_gateway] = jobs("single", 2, SHORT)
    async with (
        MemoryBus(broker, user="worker") as bus,
        MemoryBus(broker, user="mallory") as mallory,
        MemoryBus(broker, user="alice") as alice,
        MemoryBus(broker, user="gateway") as gateway,
        echo_worker(bus, **options),
        asking(mallory, waiting) as flood,
    ):
        await until_taken(bus)
        logs = [
            await ask(alice, replace(of_alice, request_id="alice.1")),
            await ask(gateway, of_gateway),
        ]
        num_answered = sum(task.done() for task in flood)

    assert all(map(is_answered, logs))
    assert num_answered == 0


async def test_jobs_that_were_set_aside_are_answered_in_order() -> None:
    brake = Brake()
    async with (
        MemoryBus() as bus,
        echo_worker(bus, brake=brake, max_num_seqs=1, max_waiting_jobs=4),
    ):
        waiting = jobs("flood", 61, SHORT)
        answered: list[str] = []

        async def ask_one(job: GenerationJob) -> None:
            await ask(bus, job)
            answered.append(job.request_id)

        async with asyncio.TaskGroup() as asking_all:
            for job in waiting:
                asking_all.create_task(ask_one(job))
                await asyncio.sleep(0)
            # No job ends before the worker has found a place for all.
            await until_taken(bus)
            await wait_announced(bus, lambda said: said.num_waiting > 0)
            brake.release()

    assert answered == [job.request_id for job in waiting]


async def test_jobs_that_were_set_aside_are_answered_by_the_next_worker() -> None:
    broker = MemoryBroker()
    options: dict[str, Any] = {"step_s": STEP_S, "max_num_seqs": 1, "max_waiting_jobs": 4}
    async with MemoryBus(broker) as bus:
        async with echo_worker(broker, **options, drain_grace_s=0.05), asking(bus, jobs("", 1)):
            await until_taken(bus)
            waiting = jobs("", 40, SHORT)
            answers = [asyncio.create_task(ask(bus, job)) for job in waiting]
            while not await num_ready(bus, OVERFLOW):  # noqa: ASYNC110 (nobody says when)
                await asyncio.sleep(0.01)
            await until_taken(bus)
        async with echo_worker(broker):
            logs = await asyncio.gather(*answers)

    assert all(map(is_answered, logs))
    starts = [event for log in logs for event in log.raw if isinstance(event, Started)]
    assert [started.is_waiting for started in starts] == [False] * len(waiting)


async def test_a_worker_that_is_free_begins_the_jobs_that_another_one_holds() -> None:
    broker = MemoryBroker()
    options: dict[str, Any] = {"step_s": STEP_S, "max_num_seqs": 1, "drain_grace_s": 0.05}
    [job] = jobs("", 1, SHORT)
    async with (
        MemoryBus(broker) as bus,
        echo_worker(broker, **options),
        asking(bus, jobs("", 1)),
        reading(bus, job) as consumer,
    ):
        await until_taken(bus)
        await publish(bus, job)
        await until_taken(bus)
        async with echo_worker(broker, **options):
            log = await read(bus, job, consumer)

    assert is_answered(log)


async def test_a_worker_without_room_leaves_new_jobs_to_one_that_is_free() -> None:
    broker = MemoryBroker()
    options: dict[str, Any] = {"step_s": STEP_S, "max_num_seqs": 2, "drain_grace_s": 0.05}
    async with (
        MemoryBus(broker) as bus,
        echo_worker(broker, **options),
        asking(bus, jobs("", 2)),
    ):
        await until_taken(bus)
        async with echo_worker(broker, **options):
            logs = [await ask(bus, job) for job in jobs("", 8, SHORT)]

    assert all(map(is_answered, logs))


async def test_the_jobs_that_a_drained_worker_held_are_answered_by_the_next_one() -> None:
    broker = MemoryBroker()
    options: dict[str, Any] = {"step_s": STEP_S, "max_num_seqs": 1, "drain_grace_s": 0.05}
    async with MemoryBus(broker) as bus:
        waiting = jobs("", 5, SHORT)
        async with echo_worker(broker, **options), asking(bus, jobs("", 1)):
            await until_taken(bus)
            answers = [asyncio.create_task(ask(bus, job)) for job in waiting]
            await asyncio.sleep(0.05)
            await until_taken(bus)
        async with echo_worker(broker):
            logs = await asyncio.gather(*answers)

    assert all(map(is_answered, logs))
    starts = [event for log in logs for event in log.raw if isinstance(event, Started)]
    assert [started.is_waiting for started in starts] == [False] * len(waiting)
