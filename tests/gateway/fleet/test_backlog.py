"""Who has to wait too long is told so, before any work."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import pytest

from gateway.fleet.live_workers import Backlog
from shared import topology
from shared.bus.base import Message
from shared.bus.memory import MemoryBus
from shared.errors import Overloaded
from shared.messages import Announcement
from shared.topology import Lane

MODEL = "m"
SLOTS = 4


@dataclass
class Clock:
    """The clock of the backlog, which tests advance."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def announcement(worker: str, num_running: int, num_answered: int) -> Announcement:
    return Announcement(
        worker=worker,
        model=MODEL,
        vocab_size=1,
        max_seq_len=1,
        fingerprint="",
        max_num_seqs=SLOTS,
        num_running=num_running,
        num_answered=num_answered,
    )


@asynccontextmanager
async def backlog_of(
    clock: Clock, num_jobs: int, *, max_wait_s: float, lane: Lane = "interactive"
) -> AsyncIterator[Backlog]:
    """So many jobs wait."""
    queue = topology.jobs_queue(MODEL, lane)
    async with MemoryBus() as bus:
        await bus.declare(queue)
        for _ in range(num_jobs):
            await bus.publish(queue.bindings[0], Message(b""))
        yield Backlog(bus, max_wait_s, clock)


@asynccontextmanager
async def busy(
    clock: Clock,
    num_jobs: int,
    *workers: str,
    max_wait_s: float,
    num_answered: int = 1,
    lane: Lane = "interactive",
) -> AsyncIterator[Backlog]:
    """So many jobs wait, and ``workers``, all of whose slots are taken, have each answered
    ``num_answered`` within a fifth of a second."""
    async with backlog_of(clock, num_jobs, max_wait_s=max_wait_s, lane=lane) as backlog:
        for worker in workers:
            backlog.hear(announcement(worker, SLOTS, 0))
        clock.now += 0.2
        for worker in workers:
            backlog.hear(announcement(worker, SLOTS, num_answered))
        await settled(backlog, *workers)
        yield backlog


async def settled(backlog: Backlog, *workers: str) -> None:
    """Ask once, and let the depth be looked up."""
    backlog.require_short_wait(MODEL, workers)
    await asyncio.sleep(0.01)


async def test_the_wait_is_the_depth_over_the_rate_of_all_workers(clock: Clock) -> None:
    async with busy(clock, 200, "a", "b", max_wait_s=10) as backlog:
        with pytest.raises(Overloaded) as refused:
            backlog.require_short_wait(MODEL, ["a", "b"])

    num_a_second = 10
    assert refused.value.retry_after_s == pytest.approx(200 / num_a_second - 10, rel=0.2)


async def test_a_short_enough_queue_takes_more_until_those_it_took_make_it_too_long(
    clock: Clock,
) -> None:
    async with busy(clock, 45, "a", max_wait_s=10) as backlog:
        num_admitted = 0
        with suppress(Overloaded):
            for num_admitted in range(20):  # noqa: B007 - the last one before the error
                backlog.require_short_wait(MODEL, ["a"])

    assert num_admitted == pytest.approx(5, abs=3)


async def test_the_client_is_never_sent_away_for_more_than_a_minute(clock: Clock) -> None:
    async with busy(clock, 2000, "a", max_wait_s=1) as backlog:
        with pytest.raises(Overloaded) as refused:
            backlog.require_short_wait(MODEL, ["a"])

    assert refused.value.retry_after_s == 60


async def test_jobs_that_were_set_aside_delay_only_who_has_many(clock: Clock) -> None:
    async with busy(clock, 1000, "a", max_wait_s=10, lane="overflow") as backlog:
        backlog.require_short_wait(MODEL, ["a"], 63)
        with pytest.raises(Overloaded):
            backlog.require_short_wait(MODEL, ["a"], 64)


@pytest.mark.parametrize(
    "heard",
    [
        [],
        [announcement("a", SLOTS, 0)],
        [announcement("a", 1, 0), announcement("a", 1, 0)],
        [announcement("a", SLOTS, 9), announcement("a", SLOTS - 1, 9)],
    ],
    ids=["unknown", "heard once", "idle", "has room again"],
)
async def test_nobody_is_refused_by_a_guess(heard: list[Announcement], clock: Clock) -> None:
    async with backlog_of(clock, 1000, max_wait_s=0.001) as backlog:
        for one in heard:
            backlog.hear(one)
            clock.now += 0.2
        await settled(backlog, "a")

        for _ in range(100):
            backlog.require_short_wait(MODEL, ["a"])


async def test_one_worker_with_room_lets_all_in(clock: Clock) -> None:
    async with busy(clock, 1000, "a", max_wait_s=0.001) as backlog:
        backlog.hear(announcement("b", 0, 0))

        backlog.require_short_wait(MODEL, ["a", "b"])


async def test_workers_that_answer_nothing_for_longer_than_the_wait_are_no_hope(
    clock: Clock,
) -> None:
    async with busy(clock, 1, "a", max_wait_s=0.1, num_answered=0) as backlog:
        with pytest.raises(Overloaded):
            backlog.require_short_wait(MODEL, ["a"])


async def test_a_depth_that_is_old_refuses_nobody(clock: Clock) -> None:
    async with busy(clock, 1000, "a", max_wait_s=0.1) as backlog:
        clock.now += 1.1

        backlog.require_short_wait(MODEL, ["a"])


async def test_workers_that_die_without_a_word_are_forgotten(clock: Clock) -> None:
    async with backlog_of(clock, 0, max_wait_s=10) as backlog:
        for hour in range(100):
            clock.now = hour * 3600.0
            backlog.hear(announcement(f"worker {hour}", SLOTS, 0))

        assert len(backlog._rates) == 1
