"""Worker processes that die, hang, stall and leave, over a real broker. The test is the reader."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest

from shared import topology
from shared.bus.base import Bus
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.bus.rabbit import RabbitBus
from shared.errors import BusUnavailable, QueueBusy
from shared.messages import (
    Failed,
    Finished,
    GenerationJob,
    HandedOver,
    SamplingParams,
    Started,
    TextPrompt,
    TokenPrompt,
)
from tests.support import PATIENCE_S
from tests.support.deployment.broker import Broker, RabbitNode
from tests.support.deployment.processes import NO_TLS, START_TIMEOUT_S, WarrenProcess, free_port
from tests.support.metrics import sample
from tests.support.workers.jobs import Log, ask, ask_all, new_job, num_ready, publish, read, reading
from tests.support.workers.synthetic import echo_worker
from tests.system.chaos.worker import DEADLY_TOKEN

pytestmark = pytest.mark.rabbit

SAMPLING = SamplingParams(max_tokens=100, ignore_eos=True)
SHORT = SamplingParams(max_tokens=20, ignore_eos=True)
LONG = SamplingParams(max_tokens=300, ignore_eos=True)
RUNNING = "warren_worker_sequences_running"
GENERATED = "warren_worker_generation_tokens_total"
LOG_EXPIRES_S = 300.0
PATIENT = {"WARREN_DISCONNECT_GRACE_S": "600"}
"""Variables of workers that wait for the readers of their jobs."""


@pytest.fixture
async def bus(broker: Broker) -> AsyncIterator[RabbitBus]:
    # A busy broker may take longer to delete a queue than the usual limit.
    async with RabbitBus(broker.url_of("gateway"), timeout_s=PATIENCE_S) as bus:
        yield bus


class Workers:
    """Starts echo workers, and ends all of them."""

    def __init__(self, broker: Broker, logs: Path) -> None:
        self._url = broker.url_of("worker")
        self._logs = logs
        self._started: list[WarrenProcess] = []

    def start(self, *options: str, query: str = "") -> WarrenProcess:
        port = free_port()
        log = self._logs / f"{len(self._started)}"
        broker = f"--broker={self._url}{query}"
        module = ["-m", "tests.system.chaos.worker", broker, f"--health-port={port}"]
        worker = WarrenProcess([*module, *options], port, log, PATIENT)
        worker.start()
        self._started.append(worker)
        return worker

    async def serving(self, *options: str, query: str = "") -> WarrenProcess:
        worker = self.start(*options, query=query)
        await asyncio.to_thread(worker.wait_healthy)
        return worker

    def end(self) -> None:
        """End the workers that live, once they have acknowledged what they have answered, or it
        would reach the next test."""
        for worker in self._started:
            worker.terminate()


@pytest.fixture
def workers(broker: Broker, tmp_path: Path) -> Iterator[Workers]:
    workers = Workers(broker, tmp_path)
    yield workers
    workers.end()


def new_jobs(count: int, sampling: SamplingParams = SAMPLING) -> list[GenerationJob]:
    return [new_job("echo", TextPrompt(text=f"Job {k}"), sampling=sampling) for k in range(count)]


async def expected(jobs: Sequence[GenerationJob]) -> list[list[int]]:
    """The undisturbed answers, of a worker in this process."""
    broker = MemoryBroker()
    async with MemoryBus(broker) as bus, echo_worker(broker):
        return [log.token_ids for log in await ask_all(bus, jobs)]


def is_running(worker: WarrenProcess) -> bool:
    return sample(worker, RUNNING) > 0


async def wait_until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(START_TIMEOUT_S):
        while not await asyncio.to_thread(is_true):  # noqa: ASYNC110 - other processes' matters
            await asyncio.sleep(0.05)


async def test_a_worker_and_its_reader_killed_together_lose_nothing(
    bus: RabbitBus, workers: Workers
) -> None:
    (job,) = new_jobs(1, LONG)
    (answer,) = await expected([job])
    victim = await workers.serving("--step-ms=200")  # so slow that its answer has not ended
    async with reading(bus, job) as consumer:
        await publish(bus, job)
        await read(bus, job, consumer, num_tokens=3)
    victim.kill()
    heir = await workers.serving("--step-ms=5")
    await wait_until(lambda: sample(heir, GENERATED) > 0)  # without a reader
    async with reading(bus, job) as consumer:
        log = await read(bus, job, consumer)

    assert log.token_ids == answer
    assert log.reader.attempt == 2


async def test_a_worker_that_was_stopped_lets_go_of_its_jobs_and_serves_on(
    bus: RabbitBus, workers: Workers
) -> None:
    jobs = new_jobs(4, LONG)
    answers = await expected(jobs)
    # Its answers take longer than the start of the other worker may.
    sleeper = await workers.serving("--step-ms=250", "--stall-timeout-s=4", query="?heartbeat=1")
    asking = asyncio.create_task(ask_all(bus, jobs))
    await wait_until(lambda: sample(sleeper, RUNNING) == len(jobs))
    other = await workers.serving("--step-ms=10")
    num_held = await asyncio.to_thread(sample, sleeper, RUNNING)
    os.kill(sleeper.pid, signal.SIGSTOP)
    logs = await asking  # its connection is dead after 2.3 s, and the answers take 3 s
    os.kill(sleeper.pid, signal.SIGCONT)
    await wait_until(lambda: sample(sleeper, RUNNING) == 0)
    await wait_until(
        lambda: httpx.get(f"{sleeper.url}/health", timeout=60, verify=NO_TLS).status_code == 200
    )
    await asyncio.to_thread(other.kill)
    again = await ask_all(bus, new_jobs(4, SHORT))

    assert num_held == len(jobs)
    assert [log.token_ids for log in logs] == answers
    assert [log.token_ids for log in again] == [answer[: SHORT.max_tokens] for answer in answers]
    assert sleeper.is_alive


async def test_a_worker_that_hangs_ends_itself(bus: RabbitBus, workers: Workers) -> None:
    (job,) = new_jobs(1)
    (answer,) = await expected([job])
    hanging = await workers.serving("--step-ms=100000", "--stall-timeout-s=2")
    asking = asyncio.create_task(ask(bus, job))
    await wait_until(lambda: not hanging.is_alive)
    await workers.serving()
    log = await asking

    assert log.token_ids == answer
    assert "worker hangs" in hanging.log


@asynccontextmanager
async def short_consumer_timeout(broker: Broker) -> AsyncIterator[None]:
    """Shorten the timeout of channels that are opened during the block."""
    if not isinstance(broker, RabbitNode):
        pytest.skip("a foreign broker keeps its settings")

    async def set_to(timeout_ms: int, tick_ms: int) -> None:
        settings = f"[{{consumer_timeout, {timeout_ms}}}, {{channel_tick_interval, {tick_ms}}}]"
        # Meanwhile the loop must keep up the heartbeats of its connections.
        await asyncio.to_thread(broker.evaluate, f"application:set_env([{{rabbit, {settings}}}]).")

    await set_to(1500, 300)
    try:
        yield
    finally:
        await set_to(86400000, 60000)


async def follow(bus: Bus, job: GenerationJob) -> Log:
    """Read to the end, through closed channels."""
    queue = topology.reply_key(job.request_id)
    while True:
        try:
            async with bus.consume(queue, is_exclusive=True) as consumer:
                return await read(bus, job, consumer)
        except (BusUnavailable, QueueBusy):
            await asyncio.sleep(0.05)


async def test_a_job_that_the_brokers_timeout_took_away_is_not_interrupted(
    broker: Broker, bus: RabbitBus, workers: Workers
) -> None:
    jobs = new_jobs(2, SamplingParams(max_tokens=200, ignore_eos=True))
    answers = await expected(jobs)
    async with short_consumer_timeout(broker):
        worker = await workers.serving("--step-ms=20")
        async with RabbitBus(broker.url_of("gateway")) as reader:
            for job in jobs:
                await reader.declare(topology.reply_queue(job.request_id, LOG_EXPIRES_S))
                await publish(reader, job)
            logs = await asyncio.gather(*(follow(reader, job) for job in jobs))
        await asyncio.to_thread(worker.terminate)
    state = await bus.inspect(topology.jobs_queue("echo", "interactive").name)

    assert [log.token_ids for log in logs] == answers
    assert "job adopted" in worker.log
    assert [sum(isinstance(e, Started) for e in log.raw) for log in logs] == [1, 1]
    assert state is not None
    assert state.num_ready == 0


@asynccontextmanager
async def supervised(workers: Workers, count: int) -> AsyncIterator[None]:
    """Run this many workers; each is replaced when it dies."""

    async def supervise(worker: WarrenProcess) -> None:
        while True:
            while worker.is_alive:  # noqa: ASYNC110 - a process has no event
                await asyncio.sleep(0.05)
            worker = workers.start()  # it may die at once

    serving = [workers.start() for _ in range(count)]
    for worker in serving:
        await asyncio.to_thread(worker.wait_healthy)
    tasks = [asyncio.create_task(supervise(worker)) for worker in serving]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_deadly_job_is_dead_lettered_and_its_neighbours_are_not(
    bus: RabbitBus, workers: Workers
) -> None:
    jobs = new_jobs(8, SamplingParams(max_tokens=40, ignore_eos=True))
    answers = await expected(jobs)
    deadly = new_job("echo", TokenPrompt(token_ids=(1, DEADLY_TOKEN)), sampling=SAMPLING)
    async with supervised(workers, 2):
        num_dead = await num_ready(bus, topology.DEAD_LETTERS.name)
        *logs, log = await ask_all(bus, [*jobs, deadly])
        # The reader is told first, and there is no event for the end of a queue.
        while await num_ready(bus, topology.DEAD_LETTERS.name) == num_dead:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    assert [log.token_ids for log in logs] == answers
    assert isinstance(log.last, Failed)
    assert log.last.code == "worker_lost"
    assert await num_ready(bus, topology.DEAD_LETTERS.name) == num_dead + 1


async def test_a_rolling_restart_under_load_fails_nothing(bus: RabbitBus, workers: Workers) -> None:
    jobs = new_jobs(6)
    answers = await expected(jobs)
    serving = [await workers.serving("--drain-grace-s=0.05") for _ in range(2)]
    is_over = asyncio.Event()

    async def keep_asking(k: int) -> list[Log]:
        logs = []
        while not is_over.is_set():
            logs.append(await ask(bus, new_jobs(len(jobs))[k]))
        return logs

    asking = [asyncio.create_task(keep_asking(k)) for k in range(len(jobs))]
    for worker in serving:
        await workers.serving("--drain-grace-s=0.05")
        await wait_until(partial(is_running, worker))
        assert await asyncio.to_thread(worker.terminate) == 0
    is_over.set()
    logs = await asyncio.gather(*asking)

    assert all(isinstance(log.last, Finished) for several in logs for log in several)
    assert [[log.token_ids for log in several] for several in logs] == [
        [answer] * len(several) for answer, several in zip(answers, logs, strict=True)
    ]
    assert any(isinstance(e, HandedOver) for several in logs for log in several for e in log.raw)
    assert max(log.reader.num_lost_runs for several in logs for log in several) == 0
