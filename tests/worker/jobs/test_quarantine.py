"""Jobs whose workers die go on twice in company and once alone; then they are dead-lettered."""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from shared import topology
from shared.bus.base import Binding, Bus, Consumer, Message
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.errors import AccessRefused
from shared.messages import (
    Completed,
    Failed,
    Finished,
    GenerationJob,
    HandedOver,
    SamplingParams,
    TokenDelta,
    decode_event,
)
from shared.topology import Lane
from tests.support.engines.brake import Brake
from tests.support.workers.jobs import (
    Log,
    ask,
    come_back,
    new_job,
    num_ready,
    publish,
    read,
    reading,
    say_started,
    wait_consumers,
    wait_running,
)
from tests.support.workers.synthetic import doomed_worker, echo_worker
from worker.jobs import quarantine
from worker.jobs.delivery import num_returns_before
from worker.jobs.quarantine import Solitude
from worker.jobs.run import LAST_RETURNS, MAX_RETURNS

SAMPLING = SamplingParams(max_tokens=100, ignore_eos=True)
CRASHING = SamplingParams(max_tokens=400, ignore_eos=True)
"""So long that no worker is done before it dies."""
SHORT = SamplingParams(max_tokens=20, ignore_eos=True)
LONG = SamplingParams(max_tokens=8000, ignore_eos=True)
STEP_S = 0.005


class TokenlessBus(MemoryBus):
    """Confirms no token, and writes none."""

    async def publish(self, binding: Binding, message: Message) -> None:
        if binding.exchange == topology.REPLIES:
            event = decode_event(message.body, message.content_type)
            if isinstance(event, TokenDelta | Finished):
                await asyncio.Event().wait()
        await super().publish(binding, message)


async def crash(
    broker: MemoryBroker,
    bus: Bus,
    job: GenerationJob,
    consumer: Consumer,
    log: Log,
    num_attempts: int = 1,
) -> None:
    """A worker takes the job so often and dies before it has written a token."""
    async with TokenlessBus(broker) as theirs, doomed_worker(theirs, step_s=STEP_S):
        await read(bus, job, consumer, log, attempt=log.reader.attempt + num_attempts)


async def crash_after_tokens(
    broker: MemoryBroker, bus: Bus, job: GenerationJob, consumer: Consumer, log: Log
) -> None:
    """A worker takes the job, writes some tokens and dies."""
    async with doomed_worker(broker, brake=Brake(8)):
        await read(bus, job, consumer, log, num_tokens=len(log.token_ids) + 5)


@asynccontextmanager
async def crashed(
    broker: MemoryBroker, bus: Bus, job: GenerationJob, num_crashes: int
) -> AsyncIterator[tuple[Consumer, Log]]:
    """A job whose workers died before they wrote a token, its reader, and what that has read."""
    await topology.declare_worker(bus, job.model, "test")
    async with reading(bus, job) as consumer:
        await publish(bus, job)
        log = Log.of(job)
        for _ in range(num_crashes):
            await crash(broker, bus, job, consumer, log)
        yield consumer, log


@asynccontextmanager
async def returned(
    bus: Bus, job: GenerationJob, lane: Lane, num_returns: int
) -> AsyncIterator[Consumer]:
    """A job of mode "final" that came back so often, and its answer's reader."""
    async with reading(bus, job) as consumer:
        await topology.declare_worker(bus, "echo", "test")
        await publish(bus, job, lane)
        await come_back(bus, job, lane, num_returns)
        yield consumer


async def test_a_job_that_crashed_once_goes_on_in_company() -> None:
    job, broker = new_job("echo", sampling=CRASHING), MemoryBroker()
    async with (
        MemoryBus(broker) as bus,
        crashed(broker, bus, job, 1) as (consumer, log),
        echo_worker(bus),
    ):
        log = await read(bus, job, consumer, log)

    assert len(log.token_ids) == 400
    assert not [event for event in log.raw if isinstance(event, HandedOver)]


async def test_a_job_that_crashed_twice_goes_on_alone() -> None:
    job, broker = new_job("echo", sampling=CRASHING), MemoryBroker()
    async with MemoryBus(broker) as bus:
        async with crashed(broker, bus, job, 2) as (consumer, log), echo_worker(bus):
            log = await read(bus, job, consumer, log)
        async with echo_worker(bus):
            undisturbed = await ask(bus, msgspec.structs.replace(job, request_id="undisturbed"))

    assert log.token_ids == undisturbed.token_ids
    assert len([event for event in log.raw if isinstance(event, HandedOver)]) == 1
    assert (log.reader.attempt, log.reader.num_crashes) == (4, 2)


async def test_a_job_that_is_moved_has_a_line_with_its_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    job, broker = new_job("echo", sampling=CRASHING), MemoryBroker()
    async with (
        MemoryBus(broker) as bus,
        crashed(broker, bus, job, 2) as (consumer, log),
        echo_worker(bus),
    ):
        await read(bus, job, consumer, log)

    (moved,) = (vars(one) for one in caplog.records if one.message == "job moved")
    assert moved["to"] == topology.jobs_queue("echo", "suspect").name
    assert (moved["worker"], moved["class"]) == (log.reader.worker, "interactive")
    assert moved["attempt"] == 3


async def test_a_job_that_waits_leaves_its_queue_before_the_broker_gives_it_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    running, waiting = new_job("echo", sampling=LONG), new_job("echo", sampling=SHORT)
    broker = MemoryBroker()
    async with (
        MemoryBus(broker) as bus,
        reading(bus, running) as reader,
        echo_worker(bus, step_s=STEP_S, max_num_seqs=1, drain_grace_s=0.05),
    ):
        await publish(bus, running)
        log = await read(bus, running, reader, num_tokens=1)
        await publish(bus, waiting, num_returns=MAX_RETURNS)
        while "job moved" not in caplog.messages:  # noqa: ASYNC110 (a log tells nobody)
            await asyncio.sleep(0.01)
        log = await read(bus, running, reader, log, num_tokens=len(log.token_ids) + 1)

    moved = [vars(one)["request_id"] for one in caplog.records if one.message == "job moved"]
    assert (moved, log.is_ended) == ([waiting.request_id], False)


async def test_the_third_crash_dead_letters_a_job_and_fails_its_log() -> None:
    job, broker = new_job("echo", sampling=CRASHING), MemoryBroker()
    async with MemoryBus(broker) as bus, crashed(broker, bus, job, 2) as (consumer, log):
        await crash(broker, bus, job, consumer, log, num_attempts=2)  # it is moved, and runs alone
        async with echo_worker(bus):
            log = await read(bus, job, consumer, log)
        dead = await num_ready(bus, topology.DEAD_LETTERS.name)

    assert isinstance(log.last, Failed)
    assert (log.last.code, log.token_ids) == ("worker_lost", [])
    assert dead == 1


async def test_a_job_that_gets_further_at_each_crash_is_not_suspicious() -> None:
    job, broker = new_job("echo", sampling=CRASHING), MemoryBroker()
    async with MemoryBus(broker) as bus:
        async with crashed(broker, bus, job, 1) as (consumer, log):
            for _ in range(4):
                await crash_after_tokens(broker, bus, job, consumer, log)
            async with echo_worker(bus):
                log = await read(bus, job, consumer, log)
        async with echo_worker(bus):
            undisturbed = await ask(bus, msgspec.structs.replace(job, request_id="undisturbed"))

    assert log.token_ids == undisturbed.token_ids
    assert not [event for event in log.raw if isinstance(event, HandedOver)]
    assert (log.reader.num_lost_runs, log.reader.num_crashes) == (5, 1)


async def test_a_job_that_gets_further_in_quarantine_goes_on_there() -> None:
    job, broker = new_job("echo", sampling=CRASHING), MemoryBroker()
    async with MemoryBus(broker) as bus, crashed(broker, bus, job, 2) as (consumer, log):
        await crash_after_tokens(broker, bus, job, consumer, log)
        async with echo_worker(bus):
            log = await read(bus, job, consumer, log)

    assert isinstance(log.last, Finished)
    assert len([event for event in log.raw if isinstance(event, HandedOver)]) == 1


async def test_a_suspect_runs_when_nothing_else_does() -> None:
    before, after = (new_job("echo", sampling=SAMPLING) for _ in range(2))
    suspect = msgspec.structs.replace(new_job("echo", sampling=SHORT), publication=1)
    running: list[str] = []

    async def is_paused(bus: Bus) -> bool:
        state = await bus.inspect(topology.jobs_queue("echo", "interactive").name)
        return state is not None and not state.num_consumers

    async def follow(bus: Bus, job: GenerationJob, name: str) -> None:
        async with reading(bus, job) as consumer:
            await publish(bus, job, "suspect" if job is suspect else "interactive")
            log = await read(bus, job, consumer, num_tokens=1)
            running.append(f"{name} begins")
            await read(bus, job, consumer, log)
            running.append(f"{name} ends")

    async with MemoryBus() as bus, echo_worker(bus, step_s=STEP_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(follow(bus, before, "before"))
        while not running:  # noqa: ASYNC110 (a list tells nobody)
            await asyncio.sleep(0.01)
        tasks.create_task(follow(bus, suspect, "suspect"))
        while not (await is_paused(bus) or "suspect begins" in running):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        tasks.create_task(follow(bus, after, "after"))

    assert running == [
        *("before begins", "before ends"),
        *("suspect begins", "suspect ends"),
        *("after begins", "after ends"),
    ]


class Neighbour:
    """A consumer that has jobs as long as ``is_idle`` is not set."""

    def __init__(self) -> None:
        self.is_idle = asyncio.Event()
        self.is_idle.set()
        self.is_paused = asyncio.Event()

    async def pause(self) -> None:
        self.is_paused.set()

    async def wait_idle(self) -> None:
        await self.is_idle.wait()

    def resume(self) -> None:
        self.is_paused.clear()


class Clock:
    """The monotonic time of the quarantine, which a test moves on."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(quarantine, "time", clock)
    return clock


async def test_after_a_suspect_its_neighbours_run_before_the_next_one(clock: Clock) -> None:
    neighbour = Neighbour()
    solitude = Solitude([neighbour])

    async def run_alone(for_s: float) -> None:
        async with solitude.enter():
            clock.ahead_s += for_s

    await run_alone(for_s=1000)
    neighbour.is_idle.clear()
    following = asyncio.create_task(run_alone(for_s=0))
    await asyncio.sleep(0.5)
    was_paused = neighbour.is_paused.is_set()
    neighbour.is_idle.set()
    async with asyncio.timeout(60):
        await following

    assert not was_paused


async def test_a_suspect_does_not_wait_for_neighbours_that_have_no_jobs(clock: Clock) -> None:
    first, second = (
        msgspec.structs.replace(new_job("echo", sampling=SHORT), publication=1) for _ in range(2)
    )
    async with MemoryBus() as bus, echo_worker(bus, step_s=STEP_S), asyncio.timeout(60):
        async with reading(bus, first) as consumer:
            await publish(bus, first, "suspect")
            log = await read(bus, first, consumer, num_tokens=1)
            clock.ahead_s += 1000  # for so long its neighbours may run
            await read(bus, first, consumer, log)
        log = await ask(bus, second, "suspect")

    assert isinstance(log.last, Finished)


async def test_a_suspect_that_waits_for_long_neighbours_can_be_cancelled() -> None:
    """Nobody waits for its answer: the worker goes on with other jobs beside the long job."""
    suspect = msgspec.structs.replace(new_job("echo", sampling=SHORT), publication=1)
    options: dict[str, Any] = {"reader_grace_s": 0.1, "drain_grace_s": 0.1}
    async with MemoryBus() as bus, echo_worker(bus, step_s=STEP_S, **options):
        long = asyncio.create_task(ask(bus, new_job("echo", sampling=LONG)))
        await asyncio.sleep(0.05)
        await publish(bus, suspect, "suspect")
        await asyncio.sleep(0.05)
        log = await ask(bus, new_job("echo", sampling=SHORT))
        is_long_over = long.done()
        long.cancel()

    assert isinstance(log.last, Finished)
    assert not is_long_over


@pytest.mark.parametrize("lane", ["batch", "suspect"])
async def test_a_job_without_a_log_outlives_two_deaths(lane: Lane) -> None:
    """Of its own worker's, or of a suspect's companions: its deliveries are all that is known."""
    job = new_job("echo", sampling=SHORT, mode="final")
    async with MemoryBus() as bus, returned(bus, job, lane, 2) as consumer, echo_worker(bus):
        log = await read(bus, job, consumer)

    assert isinstance(log.completed, Completed)


async def test_a_suspect_whose_worker_dies_while_it_waits_has_not_crashed() -> None:
    """A companion kills the worker, after three that died with the job in company."""
    suspect = msgspec.structs.replace(new_job("echo", sampling=SHORT), publication=1)
    companion, broker = new_job("echo", sampling=LONG), MemoryBroker()
    async with MemoryBus(broker) as bus, reading(bus, suspect) as consumer:
        for num_returns in range(3):
            await say_started(bus, suspect, num_returns)
        async with doomed_worker(broker, brake=Brake(3)), reading(bus, companion) as of_companion:
            await publish(bus, companion)
            await read(bus, companion, of_companion, num_tokens=1)
            await publish(bus, suspect, "suspect")
            await wait_consumers(bus, topology.jobs_queue("echo", "interactive").name, 0)
            is_taken = await num_ready(bus, topology.jobs_queue("echo", "suspect").name) == 0
        await bus.delete_queue(f"reply.{companion.request_id}")  # nobody wants its answer any more
        async with echo_worker(bus, drain_grace_s=0.1):
            log = await read(bus, suspect, consumer)

    assert is_taken
    assert (log.reader.num_crashes, len(log.token_ids)) == (3, 20)
    assert isinstance(log.last, Finished)


async def test_a_suspect_without_a_log_is_dead_lettered_when_it_came_back_four_times() -> None:
    job = new_job("echo", sampling=SHORT, mode="final")
    async with MemoryBus() as bus, returned(bus, job, "suspect", 4) as consumer:
        async with echo_worker(bus):
            log = await read(bus, job, consumer)
        dead = await num_ready(bus, topology.DEAD_LETTERS.name)

    assert isinstance(log.last, Failed)
    assert (log.last.code, dead) == ("worker_lost", 1)


class UnsettledBus(MemoryBus):
    """Its broker was away a moment ago."""

    is_settled = False


async def test_a_suspect_that_lost_connections_gave_back_is_not_dead_lettered() -> None:
    job, broker = new_job("echo", sampling=SHORT, mode="final"), MemoryBroker()
    async with (
        MemoryBus(broker) as bus,
        returned(bus, job, "suspect", 4) as consumer,
        UnsettledBus(broker) as theirs,
        echo_worker(theirs),
    ):
        log = await read(bus, job, consumer)

    assert isinstance(log.completed, Completed)


async def test_draining_is_not_held_against_a_suspect() -> None:
    job = new_job("echo", sampling=SAMPLING, mode="final")
    async with MemoryBus() as bus, reading(bus, job) as consumer:
        await topology.declare_worker(bus, "echo", "test")
        await publish(bus, job, "suspect")
        async with echo_worker(bus, brake=Brake(3), drain_grace_s=0.05):
            await wait_running(bus)
        async with echo_worker(bus):
            log = await read(bus, job, consumer)

    assert isinstance(log.completed, Completed)


async def returns_in(bus: Bus, lane: Lane) -> dict[str, int]:
    """The returns that count of each job in a queue, by request id."""
    queue = topology.jobs_queue("echo", lane).name
    num_jobs = await num_ready(bus, queue)
    async with bus.consume(queue) as consumer:
        deliveries = [await anext(consumer) for _ in range(num_jobs)]
        counted = {
            one.message.correlation_id: one.num_returns + num_returns_before(one.message)
            for one in deliveries
        }
        for one in deliveries:
            await one.ack()
    return counted


@pytest.mark.parametrize("num_crashes", [0, 1])
async def test_draining_is_not_held_against_a_job_without_a_log(num_crashes: int) -> None:
    job = new_job("echo", sampling=LONG, mode="final")
    async with MemoryBus() as bus, returned(bus, job, "batch", num_crashes):
        for _ in range(2):
            async with echo_worker(bus, brake=Brake(3), drain_grace_s=0.05):
                await wait_running(bus)
        num_suspects = await num_ready(bus, topology.jobs_queue("echo", "suspect").name)
        counted = await returns_in(bus, "batch")

    assert (num_suspects, counted) == (0, {job.request_id: num_crashes})


async def test_a_job_without_a_log_that_has_not_begun_is_given_back_unnoticed() -> None:
    jobs = [new_job("echo", sampling=LONG, mode="final") for _ in range(2)]
    async with MemoryBus() as bus, returned(bus, jobs[0], "batch", 0), reading(bus, jobs[1]):
        await publish(bus, jobs[1], "batch")
        async with bus.consume(topology.jobs_queue("echo", "batch").name) as consumer:
            for _ in jobs:
                await anext(consumer)
        async with echo_worker(bus, brake=Brake(3), max_num_seqs=1, drain_grace_s=0.05):
            await wait_running(bus)
        counted = await returns_in(bus, "batch")

    assert counted == {job.request_id: 1 for job in jobs}


class RefusingBus(UnsettledBus):
    """Its user may not publish jobs."""

    refused_at = math.inf
    """When a job was first refused, a monotonic time."""

    async def publish(self, binding: Binding, message: Message) -> None:
        if binding.exchange == topology.JOBS:
            self.refused_at = min(self.refused_at, time.monotonic())
            raise AccessRefused("access to exchange 'warren.jobs' refused")
        await super().publish(binding, message)


@pytest.mark.parametrize("mode", ["stream", "final"])
async def test_a_job_that_cannot_be_moved_fails_before_its_queue_drops_it(mode: str) -> None:
    job, broker = new_job("echo", sampling=SHORT, mode=mode), MemoryBroker()
    async with (
        MemoryBus(broker) as bus,
        returned(bus, job, "batch", LAST_RETURNS - 1) as consumer,
        RefusingBus(broker) as theirs,
        asyncio.timeout(60),
    ):
        async with echo_worker(theirs):
            log = await read(bus, job, consumer)
            took_s = time.monotonic() - theirs.refused_at
        dead = await num_ready(bus, topology.DEAD_LETTERS.name)

    assert isinstance(log.last, Failed)
    assert (log.last.code, dead) == ("internal_error", 1)
    assert took_s > 0.4  # returned once, after a pause
