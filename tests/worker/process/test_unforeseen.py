"""Unexpected errors in a worker: each ends at most one job, or one iteration of a task."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, TypeAlias

import pytest

from shared import topology
from shared.bus.base import Binding, Bus, Message
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.messages import (
    Announcement,
    Completed,
    Constraint,
    Failed,
    Finished,
    GenerationJob,
    ReplyEvent,
    SamplingParams,
    TextPrompt,
    Tokenized,
    TokenizeJob,
    decode_announcement,
    decode_event,
    encode,
)
from shared.telemetry import floods, incidents
from shared.topology import Lane
from tests.support.workers.faults import (
    Strike,
    SuspendingBus,
    Unforeseen,
    argument,
    name_of,
    require_each_await_struck,
    require_reported,
    striking,
)
from tests.support.workers.jobs import ask, ask_all, new_job, num_ready, publish, read, reading
from tests.support.workers.synthetic import echo_worker
from worker.jobs import consumer, delivery, quarantine
from worker.jobs.consumer import HeldJobs
from worker.jobs.run import MAX_RETURNS
from worker.process import supervision

NUM_AWAITS = 48
"""More awaits than any job here has, also on a slow machine: the last victims are spared."""
NUM_AWAITS_ALONE = 72
"""As many of a job in quarantine, which waits for all others."""
PROMPT = TextPrompt(text="Once upon a time " * 150)
"""So long that it is tokenized in another thread."""
STEP_S = 0.002
MAX_FAILURES = 2
"""Of a run that cannot publish: it tries each event twice, and the second failure is its last."""
PATIENCE_S = 240
"""How long a queue waits for its reader, and a test for its worker: longer than a busy machine
takes."""
Job: TypeAlias = GenerationJob | TokenizeJob


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "_GIVE_BACK_PAUSE_S", 0.01)
    monkeypatch.setattr(consumer, "_RETRY_PAUSE_S", 0.01)
    monkeypatch.setattr(quarantine, "_ARRIVAL_S", 0.01)
    monkeypatch.setattr(incidents, "_MIN_RESTART_PAUSE_S", 0.01)
    monkeypatch.setattr(floods, "MAX_LINES", 1000)  # all errors of a test come within a window


def jobs(num_jobs: int, mode: str = "stream") -> list[GenerationJob]:
    """Equal jobs. Each has a constraint of its own to compile, but all have the same meaning."""
    return [
        new_job(
            "echo",
            PROMPT,
            mode=mode,
            sampling=SamplingParams(
                max_tokens=6,
                ignore_eos=True,
                constraint=Constraint(kind="regex", source=f"[a-z]{{1,{1000 + k}}}"),
            ),
        )
        for k in range(num_jobs)
    ]


def each_await(victims: Iterable[Job], num_errors: int) -> dict[str, Strike]:
    """The first job is struck from its first await on, the next job from its second, and so on."""
    return {job.request_id: Strike(at, num_errors) for at, job in enumerate(victims, 1)}


def by_job(strikes: dict[str, Strike]) -> Callable[[Coroutine[Any, Any, Any]], Strike | None]:
    def victim(coroutine: Coroutine[Any, Any, Any]) -> Strike | None:
        for name in ("JobConsumer", "QuickConsumer"):
            if delivery := argument(coroutine, f"{name}._serve", "delivery"):
                return strikes.get(delivery.message.correlation_id)
        return None

    return victim


async def require_idle(bus: Bus) -> None:
    """Wait until the worker has settled all of its deliveries, and its engine is empty."""
    async with asyncio.timeout(PATIENCE_S), announcements(bus) as hear:
        while (
            (load := await hear()).num_running
            or load.num_waiting
            or load.kv_usage
            or at_work()
            or await are_ready(bus)
        ):
            pass
    # Not isinstance: that asks deprecated objects of torch for their class, which warns.
    assert not any(held for held in gc.get_objects() if type(held) is HeldJobs)


@asynccontextmanager
async def announcements(bus: Bus) -> AsyncIterator[Callable[[], Awaitable[Announcement]]]:
    """Yields what waits for the next word of a worker."""
    queue = topology.publisher_queue("test")
    await bus.declare(queue)
    async with bus.consume(queue.name) as consumer:

        async def hear() -> Announcement:
            delivery = await anext(consumer)
            await delivery.ack()
            return decode_announcement(delivery.message.body)

        yield hear


async def are_ready(bus: Bus) -> bool:
    """Whether a job waits in a queue, such as a job that has just been returned."""
    queues = [topology.jobs_queue("echo", lane).name for lane in topology.DECLARED_LANES]
    return any([await num_ready(bus, queue) for queue in queues])


def at_work() -> list[str]:
    """Which tasks of the worker's consumers have not ended: they serve jobs, or close."""
    names = [name_of(task.get_coro()) for task in asyncio.all_tasks()]
    return [name for name in names if name.endswith(("._serve", "._close_when_idle"))]


@pytest.mark.parametrize(
    ("lane", "is_returned", "num_errors"),
    [
        ("interactive", False, 1),
        ("interactive", False, 5),
        ("interactive", True, 1),
        ("batch-overflow", True, 2),
        ("suspect", False, 1),
    ],
)
async def test_errors_at_any_await_of_a_stream_stay_in_it(
    lane: Lane, is_returned: bool, num_errors: int, caplog: pytest.LogCaptureFixture
) -> None:
    num_victims = NUM_AWAITS_ALONE if lane == "suspect" else NUM_AWAITS
    victims, others = jobs(num_victims), jobs(8)
    strikes, broker = each_await(victims, num_errors), MemoryBroker()
    async with MemoryBus(broker) as bus, AsyncExitStack() as readers:
        consumers = [
            await readers.enter_async_context(reading(bus, job)) for job in victims + others
        ]
        async with served(
            broker, bus, victims + others, strikes, lane=lane, is_returned=is_returned
        ):
            logs = await asyncio.gather(*map(partial(read, bus), victims + others, consumers))
            exact = await ask(bus, jobs(1)[0])

    assert isinstance(exact.last, Finished)
    assert {log.text for log in logs[num_victims:]} == {exact.text}
    for log in logs[:num_victims]:
        *told, end = log.accepted
        assert exact.text.startswith(log.text)
        assert not any(isinstance(event, Finished | Failed) for event in told)
        is_lost = lane == "suspect" and isinstance(end, Failed) and end.code == "worker_lost"
        assert log.text == exact.text or is_internal_error(end) or is_lost
    require_each_await_struck(strikes.values())
    require_reported(caplog, strikes.values())


@pytest.mark.parametrize(("is_returned", "num_errors"), [(False, 1), (False, 5), (True, 2)])
async def test_errors_at_any_await_of_a_job_with_one_answer_stay_in_it(
    is_returned: bool, num_errors: int, caplog: pytest.LogCaptureFixture
) -> None:
    victims, others = jobs(NUM_AWAITS, "final"), jobs(8, "final")
    strikes, broker = each_await(victims, num_errors), MemoryBroker()
    async with MemoryBus(broker) as bus:
        for job in victims + others:
            await bus.declare(topology.reply_queue(job.request_id, expires_s=PATIENCE_S))
        async with served(broker, bus, victims + others, strikes, is_returned=is_returned):
            exact = said((await ask(bus, jobs(1, "final")[0])).last)
            for job in victims + others:
                await answers_to(bus, job)
        answers = [await answers_to(bus, job) for job in victims + others]

    assert exact
    for answer in answers[NUM_AWAITS:]:
        assert [said(event) for event in answer] == [exact]
    for answer in answers[:NUM_AWAITS]:
        assert answer
        assert all(said(event) == exact or is_internal_error(event) for event in answer)
        # One that was published, and not known to be, is repeated as it was.
        assert num_errors > 1 or len(set(map(encode, answer))) == 1
    require_each_await_struck(strikes.values())
    require_reported(caplog, strikes.values())


@pytest.mark.parametrize("step", [2, 3, 4])
async def test_after_two_errors_a_job_with_one_answer_still_has_one(step: int) -> None:
    """The second error may strike when the first error has been answered."""
    victims, broker = jobs(NUM_AWAITS, "final"), MemoryBroker()
    strikes = {job.request_id: Strike(at, 2, step) for at, job in enumerate(victims, 1)}
    async with MemoryBus(broker) as bus:
        for job in victims:
            await bus.declare(topology.reply_queue(job.request_id, expires_s=PATIENCE_S))
        async with served(broker, bus, victims, strikes):
            for job in victims:
                await answers_to(bus, job)
        answers = [await answers_to(bus, job) for job in victims]

    for answer in answers:
        assert len({is_internal_error(event) or tuple(said(event)) for event in answer}) == 1


@pytest.mark.parametrize("num_errors", [1, 2, 5])
async def test_errors_at_any_await_of_a_quick_job_stay_in_it(
    num_errors: int, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = TextPrompt(text="Hello world")
    quick = [
        TokenizeJob(request_id=f"quick-{k}", model="echo", prompt=prompt)
        for k in range(NUM_AWAITS + 8)
    ]
    victims, others = quick[:NUM_AWAITS], quick[NUM_AWAITS:]
    strikes, broker = each_await(victims, num_errors), MemoryBroker()
    async with MemoryBus(broker) as bus:
        for job in quick:
            await bus.declare(topology.reply_queue(job.request_id, expires_s=PATIENCE_S))
        async with served(broker, bus, quick, strikes, lane="quick"):
            for job in quick:
                await answers_to(bus, job)
        exact = [await answers_to(bus, job) for job in others]
        answers = [await answers_to(bus, job) for job in victims]

    assert all(isinstance(answer, Tokenized) for (answer,) in exact)
    for answer in answers:
        assert answer
        assert all(isinstance(event, Tokenized) or is_internal_error(event) for event in answer)
    require_each_await_struck(strikes.values())
    require_reported(caplog, strikes.values())


@asynccontextmanager
async def served(
    broker: MemoryBroker,
    bus: Bus,
    jobs: Sequence[Job],
    strikes: dict[str, Strike],
    *,
    lane: Lane = "interactive",
    is_returned: bool = False,
) -> AsyncIterator[None]:
    """A worker that has all of ``jobs`` from its start; in the end it has to be there, and to hold
    nothing. The returned jobs were in the hands of another worker, which said no word."""
    await topology.declare_worker(bus, "echo", "test")
    for job in jobs:
        await publish(bus, job, lane)
    if is_returned:
        async with bus.consume(topology.jobs_queue("echo", lane).name) as consumer:
            for _ in jobs:
                await anext(consumer)
    with striking(by_job(strikes)):
        async with (
            asyncio.timeout(PATIENCE_S),
            SuspendingBus(broker) as suspending,
            echo_worker(suspending, step_s=STEP_S),
        ):
            yield
            await require_idle(bus)
    assert not await are_ready(bus)  # what it had not settled would be back
    # One that fails in quarantine has an answer, and is kept.
    assert lane == "suspect" or await num_ready(bus, topology.DEAD_LETTERS.name) == 0


async def answers_to(bus: Bus, job: Job) -> list[ReplyEvent]:
    """The events in a reply queue, once there are any."""
    name = f"reply.{job.request_id}"
    while not (num_answers := await num_ready(bus, name)):  # noqa: ASYNC110 (nobody says when)
        await asyncio.sleep(0.01)
    async with bus.consume(name) as consumer:
        answers = [await anext(consumer) for _ in range(num_answers)]
    return [decode_event(delivery.message.body) for delivery in answers]


def said(event: ReplyEvent) -> list[tuple[object, ...]]:
    """What is equal in all answers to equal jobs, independent of the prefix cache."""
    choices = event.choices if isinstance(event, Completed) else ()
    return [(choice.token_ids, choice.text, choice.finish_reason) for choice in choices]


def is_internal_error(event: ReplyEvent) -> bool:
    return isinstance(event, Failed) and event.code == "internal_error"


class DeafBus(MemoryBus):
    """Raises an error that no bus should raise, for every publish to a reader."""

    def __init__(self, broker: MemoryBroker, reader: str) -> None:
        super().__init__(broker)
        self._reader = reader
        self.failed_at: list[float] = []
        """The monotonic time of each failure."""

    async def publish(self, binding: Binding, message: Message) -> None:
        if binding.routing_key == self._reader:
            self.failed_at.append(time.monotonic())
            raise Unforeseen("not for this one")
        await super().publish(binding, message)


@pytest.mark.parametrize("mode", ["stream", "final"])
async def test_a_job_whose_every_word_fails_ends_among_the_dead_letters(
    mode: str,
) -> None:
    (job,), broker = jobs(1, mode), MemoryBroker()
    async with (
        asyncio.timeout(PATIENCE_S),
        MemoryBus(broker) as bus,
        DeafBus(broker, f"reply.{job.request_id}") as deaf,
        echo_worker(deaf, step_s=STEP_S),
        reading(bus, job),
    ):
        (exact,) = {log.text for log in await ask_all(bus, jobs(2))}
        await publish(bus, job)
        others = [await ask(bus, jobs(1)[0])]
        while not await num_ready(bus, topology.DEAD_LETTERS.name):
            others += await ask_all(bus, jobs(2))
        await require_idle(bus)
        num_dead = await num_ready(bus, topology.DEAD_LETTERS.name)
        num_said = await num_ready(bus, f"reply.{job.request_id}")

    assert {log.text for log in others} == {exact}
    assert (num_dead, num_said) == (1, 0)
    # Each run says that it has started, and that it failed; the limits allow so many.
    assert len(deaf.failed_at) <= 2 * (MAX_RETURNS + topology.JOBS_DELIVERY_LIMIT + 2)


async def test_a_job_that_fails_each_time_is_not_run_at_full_speed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    (job,), broker = jobs(1), MemoryBroker()
    async with (
        MemoryBus(broker) as bus,
        DeafBus(broker, f"reply.{job.request_id}") as deaf,
        echo_worker(deaf),
        reading(bus, job),
    ):
        await publish(bus, job)
        while len(deaf.failed_at) <= 2 * MAX_FAILURES:  # noqa: ASYNC110 (nobody says when)
            await asyncio.sleep(0.01)
        first, last = deaf.failed_at[0], deaf.failed_at[2 * MAX_FAILURES]

    # A run has at most so many failures, and each run but the first comes after a pause.
    assert last - first >= 2 * delivery._GIVE_BACK_PAUSE_S


@pytest.mark.parametrize("at", range(1, 13))
async def test_an_error_at_any_await_of_a_background_task_leaves_it_running(
    at: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tasks of the worker are struck at once while it serves."""
    monkeypatch.setattr(supervision, "_READER_CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(supervision, "_PROMOTION_INTERVAL_S", 0.01)
    strikes: list[Strike] = []

    def victim(coroutine: Coroutine[Any, Any, Any]) -> Strike | None:
        name = name_of(coroutine)
        if name == "JobConsumer._serve" or not name.startswith(("keep_running", "JobConsumer.")):
            return None
        strikes.append(Strike(at))
        return strikes[-1]

    broker = MemoryBroker()
    endless = new_job("echo", sampling=SamplingParams(max_tokens=8000, ignore_eos=True))
    quick = TokenizeJob(request_id="quick", model="echo", prompt=TextPrompt(text="Hello world"))
    async with MemoryBus(broker) as bus, asyncio.timeout(PATIENCE_S):
        await bus.declare(topology.reply_queue(quick.request_id, expires_s=PATIENCE_S))
        with striking(victim, with_children=False):
            async with (
                SuspendingBus(broker) as suspending,
                echo_worker(suspending, step_s=STEP_S, reader_grace_s=0.1, drain_grace_s=0.5),
            ):
                logs = await ask_all(bus, [*jobs(8), *jobs(8)])
                await publish(bus, quick, "quick")
                (tokenized,) = await answers_to(bus, quick)
                async with reading(bus, endless) as consumer:  # now nobody reads it
                    await publish(bus, endless)
                    await read(bus, endless, consumer, num_tokens=2)
                await require_idle(bus)
                for strike in strikes:  # a worker that is shutting down continues to do so
                    strike.end()
        assert await num_ready(bus, topology.jobs_queue("echo", "interactive").name) == 0

    assert len({log.text for log in logs}) == 1
    assert all(isinstance(log.last, Finished) for log in logs)
    assert isinstance(tokenized, Tokenized)
    require_reported(caplog, strikes)
