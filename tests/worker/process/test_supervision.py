"""The supervision of jobs that nobody reads."""

import asyncio

from msgspec.structs import replace

from shared.bus.memory import MemoryBroker, MemoryBus
from shared.messages import Finished, SamplingParams
from tests.support.workers.jobs import LateBus, new_job, publish, read, reading
from tests.support.workers.synthetic import echo_worker

SAMPLING = SamplingParams(max_tokens=2, ignore_eos=True)
STEP_S = 1.5
"""Longer than the supervisor's interval: it misses the log before the worker writes to it."""


async def test_a_job_that_was_begun_again_is_not_cancelled_for_the_log_of_its_last_run() -> None:
    broker = MemoryBroker()
    job = new_job("echo", sampling=SAMPLING)
    async with (
        MemoryBus(broker) as bus,
        LateBus(broker) as late,
        echo_worker(late, step_s=STEP_S),
    ):
        async with reading(bus, job) as consumer:
            await publish(bus, job)
            await read(bus, job, consumer, num_tokens=1)
        await bus.delete_queue(f"reply.{job.request_id}")
        await asyncio.wait_for(late.is_missed.wait(), 10)
        async with reading(bus, job) as consumer:
            await publish(bus, replace(job, publication=1))
            log = await read(bus, job, consumer, num_tokens=1)
            late.may_answer.set()
            log = await read(bus, job, consumer, log)

    assert isinstance(log.last, Finished)
