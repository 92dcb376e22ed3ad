"""Workers whose clocks differ from the gateway's."""

from collections.abc import AsyncIterator

import msgspec
import pytest

from gateway.fleet.clocks import WorkerClocks
from gateway.fleet.live_workers import Backlog, LiveWorkers
from shared import topology
from shared.bus.memory import MemoryBus
from shared.messages import TextPrompt, decode_job
from tests.gateway.fleet.announcements import announcement
from tests.support.workers.jobs import new_job

NOW = 1_800_000_000.0
HOUR_S = 3600.0
JOB = msgspec.structs.replace(new_job("m", TextPrompt(text="word")), deadline=NOW + 600)


@pytest.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    async with MemoryBus() as bus:
        yield bus


def clocks() -> WorkerClocks:
    return WorkerClocks(lambda: NOW)


async def deadline_published(bus: MemoryBus, **ahead_s: float) -> float | None:
    """The deadline that a worker reads, if the workers' clocks are so far ahead."""
    queue = topology.jobs_queue("m", "interactive")
    await bus.declare(queue)
    live = LiveWorkers(bus, Backlog(bus, 60), clocks=clocks())
    for name, seconds in ahead_s.items():
        live.hear(announcement(name, sent_at=NOW + seconds))
    await live.publish(JOB, "reply.x")
    async with bus.consume(queue.name) as consumer:
        delivery = await anext(consumer)
        return decode_job(delivery.message.body, delivery.message.content_type).deadline


@pytest.mark.parametrize(
    ("ahead_s", "shift_s"),
    [
        ({"a": HOUR_S}, HOUR_S),
        ({"a": 0.0, "b": HOUR_S}, HOUR_S),
        ({"a": -HOUR_S}, 0.0),
        ({"a": 0.4}, 0.0),
        ({}, 0.0),
    ],
)
async def test_a_deadline_is_moved_for_the_clock_that_is_ahead(
    bus: MemoryBus, ahead_s: dict[str, float], shift_s: float
) -> None:
    assert await deadline_published(bus, **ahead_s) == NOW + 600 + shift_s


@pytest.mark.parametrize("ahead_s", [HOUR_S, -HOUR_S])
def test_a_clock_that_differs_is_reported_once(
    caplog: pytest.LogCaptureFixture, ahead_s: float
) -> None:
    heard = clocks()
    for _ in range(3):
        heard.hear(announcement("a", sent_at=NOW + ahead_s))

    [line] = caplog.records
    assert vars(line)["worker"] == "worker.a"
    assert vars(line)["ahead_s"] == ahead_s


def test_a_clock_that_was_set_right_is_reported_when_it_differs_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    heard = clocks()
    for ahead_s in (HOUR_S, 0.0, HOUR_S):
        heard.hear(announcement("a", sent_at=NOW + ahead_s))

    assert len(caplog.records) == 2


def test_workers_that_do_not_say_the_time_are_not_compared(
    caplog: pytest.LogCaptureFixture,
) -> None:
    heard = clocks()
    heard.hear(announcement("a"))

    assert heard.ahead_s("worker.a") == 0.0
    assert not caplog.records


def test_a_worker_that_is_gone_moves_no_deadline() -> None:
    heard = clocks()
    heard.hear(announcement("a", sent_at=NOW + HOUR_S))
    heard.forget_all_but([])

    assert heard.are_level
