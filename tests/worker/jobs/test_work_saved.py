"""Jobs that nobody wants any more cost the engine nothing, or next to it."""

import asyncio
import time
import urllib.request

import msgspec
import pytest

from gateway.fleet.publishing import JobPublisher
from shared import topology
from shared.bus.base import Bus, Message
from shared.bus.memory import MemoryBus
from shared.messages import Cancel, Failed, GenerationJob, SamplingParams, TokenPrompt, encode
from tests.support.deployment.processes import free_port
from tests.support.engines.brake import Brake
from tests.support.metrics import total
from tests.support.workers.jobs import ask, new_job, num_ready, publish, read, reading
from tests.support.workers.synthetic import echo_worker

LONG = SamplingParams(max_tokens=2000, temperature=0.0, ignore_eos=True)
PROMPT = TokenPrompt(token_ids=tuple(range(1000)))
STEPS = "step_duration_seconds_count"


def sample(port: int, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
        return total(response.read().decode(), f"warren_worker_{name}")


async def num_prompt_tokens(bus: Bus, port: int) -> float:
    """Tokens of prompts that the engine was given, without the single token of the job that is sent
    to learn it."""
    await ask(bus, new_job("echo", TokenPrompt(token_ids=(1,))))
    return await asyncio.to_thread(sample, port, "prompt_tokens_total") - 1


@pytest.mark.parametrize("mode", ["stream", "final"])
async def test_an_expired_job_is_not_computed(mode: str) -> None:
    port = free_port()
    job = new_job("echo", PROMPT, sampling=LONG, mode=mode, deadline=time.time() - 1)
    async with MemoryBus() as bus, echo_worker(bus, health_port=port):
        await ask(bus, job)
        num_tokens = await num_prompt_tokens(bus, port)

    assert num_tokens == 0


@pytest.mark.parametrize("mode", ["stream", "final"])
async def test_a_job_that_expires_before_a_worker_comes_is_no_dead_letter(mode: str) -> None:
    job = new_job("echo", PROMPT, mode=mode, deadline=time.time() + 0.05)
    async with MemoryBus() as bus:
        await bus.declare(topology.DEAD_LETTERS, topology.jobs_queue("echo", "interactive"))
        async with reading(bus, job) as consumer:
            await JobPublisher(bus).publish(job, topology.reply_key(job.request_id))
            await asyncio.sleep(0.1)
            async with echo_worker(bus):
                log = await read(bus, job, consumer)
        num_dead = await num_ready(bus, topology.DEAD_LETTERS.name)

    assert isinstance(log.last, Failed)
    assert (log.last.code, num_dead) == ("deadline_exceeded", 0)


async def test_a_job_that_was_cancelled_while_it_was_queued_is_not_computed() -> None:
    port = free_port()
    job = msgspec.structs.replace(
        new_job("echo", PROMPT, sampling=LONG), created_at=time.time() - 5
    )
    async with MemoryBus() as bus, echo_worker(bus, health_port=port):
        await publish(bus, job)  # it has no reply queue any more
        num_tokens = await num_prompt_tokens(bus, port)

    assert num_tokens == 0


async def cancel(bus: Bus, job: GenerationJob, worker: str) -> None:
    command = Cancel(request_id=job.request_id)
    await bus.publish(topology.worker_binding(worker), Message(encode(command)))


async def test_a_cancelled_answer_frees_its_blocks_within_a_step() -> None:
    port = free_port()
    job, brake = new_job("echo", sampling=LONG), Brake(2)
    async with (
        MemoryBus() as bus,
        echo_worker(bus, brake=brake, health_port=port),
        reading(bus, job) as consumer,
    ):
        await publish(bus, job)
        log = await read(bus, job, consumer, num_tokens=1)
        before = usage = await asyncio.to_thread(sample, port, "kv_cache_usage_ratio")
        num_steps = await asyncio.to_thread(sample, port, STEPS)
        await cancel(bus, job, str(log.reader.worker))
        await read(bus, job, consumer, log)  # the engine has the command before the end is here
        brake.release()
        while usage:
            await asyncio.sleep(0.02)
            usage = await asyncio.to_thread(sample, port, "kv_cache_usage_ratio")
        num_steps = await asyncio.to_thread(sample, port, STEPS) - num_steps

    assert before > 0
    # The step that was about to begin, the step that was planned beside it, and the step with the
    # command.
    assert num_steps <= 3
