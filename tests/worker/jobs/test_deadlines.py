"""Workers begin jobs by their deadlines, and do not begin hopeless jobs."""

import asyncio
import logging
import time
from typing import Any

import pytest
from msgspec.structs import replace

from shared.bus.memory import MemoryBus
from shared.messages import Failed, Finished, GenerationJob, SamplingParams
from shared.telemetry.requests import LOGGER
from tests.support.deployment.processes import free_port
from tests.support.engines.brake import Brake
from tests.support.workers.jobs import Log, ask, new_job, set_pace, wait_announced
from tests.support.workers.synthetic import echo_worker
from tests.worker.jobs.test_work_saved import sample

SHORT = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=4000, temperature=0.0, ignore_eos=True)


def due_in(seconds: float | None, sampling: SamplingParams = SHORT, **more: Any) -> GenerationJob:
    deadline = None if seconds is None else time.time() + seconds
    return new_job("echo", sampling=sampling, deadline=deadline, **more)


async def learn(bus: MemoryBus) -> None:
    """Let the worker learn how long a token takes."""
    await asyncio.gather(*(ask(bus, due_in(None)) for _ in range(8)))


@pytest.mark.parametrize("mode", ["stream", "final"])
async def test_a_hopeless_job_fails_at_once_and_says_what_it_needs(
    mode: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_pace(monkeypatch, token_s=1.0)
    port = free_port()
    caplog.set_level(logging.INFO, LOGGER)
    async with MemoryBus() as bus, echo_worker(bus, health_port=port):
        await learn(bus)
        job = due_in(900, LONG, mode=mode)
        log = await ask(bus, job)
        left_s = (job.deadline or 0) - time.time()
        num_hopeless = await asyncio.to_thread(sample, port, "jobs_hopeless_total")

    assert isinstance(log.last, Failed)
    assert log.last.code == "deadline_exceeded"
    assert "s for 4000 tokens, and its deadline is in" in log.last.message
    assert not log.token_ids
    assert left_s > 0
    assert num_hopeless == 1
    (line,) = [record for record in caplog.records if record.getMessage() == "job refused"]
    fields = vars(line)
    assert fields["needed_s"] > fields["left_s"] > 0


@pytest.mark.parametrize(
    ("seconds", "sampling"),
    [
        (None, replace(SHORT, max_tokens=200)),
        (6000, replace(SHORT, max_tokens=200)),
        (6000, replace(LONG, ignore_eos=False, stop_token_ids=tuple(range(64)))),
    ],
)
async def test_a_job_that_may_be_in_time_runs(
    seconds: float | None, sampling: SamplingParams
) -> None:
    async with MemoryBus() as bus, echo_worker(bus, step_s=0.0):
        await learn(bus)
        log = await ask(bus, due_in(seconds, sampling))

    assert isinstance(log.last, Finished)


async def test_the_job_whose_deadline_comes_first_begins_first() -> None:
    answered: list[str] = []
    brake = Brake()
    async with MemoryBus() as bus, echo_worker(bus, brake=brake, max_num_seqs=1):
        first = due_in(1500)
        waiting = [due_in(seconds) for seconds in (None, 1400, 1300, 1200)]

        async def ask_one(job: GenerationJob) -> Log:
            log = await ask(bus, job)
            answered.append(job.request_id)
            return log

        async with asyncio.TaskGroup() as asking:
            for job in (first, *waiting):
                asking.create_task(ask_one(job))
                await asyncio.sleep(0)
            await wait_announced(bus, lambda said: said.num_waiting == len(waiting))
            brake.release()

    begun = [first, *(waiting[k] for k in (0, 3, 2, 1))]
    assert answered == [job.request_id for job in begun]
