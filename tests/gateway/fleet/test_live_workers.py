"""What is known about workers from their announcements."""

import time

import msgspec
import pytest

from gateway.fleet.live_workers import Backlog, LiveWorkers
from shared import topology
from shared.bus.memory import MemoryBus
from shared.messages import TextPrompt
from tests.gateway.fleet.announcements import announcement
from tests.support.workers.jobs import new_job


def test_the_load_of_a_worker_is_that_of_the_last_seconds() -> None:
    now = 0.0
    workers = LiveWorkers(MemoryBus(), Backlog(MemoryBus(), 60), clock=lambda: now)
    means = []

    for num_running in (4, 4, 0, *[0] * 9, 8):
        workers.hear(announcement(num_running=num_running))
        ((_, mean_used),) = workers.candidates("m")
        means.append(mean_used)
        now += 2.0

    assert means[:2] == [4.0, 4.0]
    assert means[11] == pytest.approx(4 / 2)  # after 20 s
    assert means[11] < means[12] < 3


def test_the_models_keep_their_order() -> None:
    workers = LiveWorkers(MemoryBus(), Backlog(MemoryBus(), 60))
    first, second = announcement("a", model="first"), announcement("b", model="second")

    for one in (first, second, first):
        workers.hear(one)

    assert list(workers.models()) == ["first", "second"]


async def test_a_model_between_two_workers_is_as_its_last_worker_said(bus: MemoryBus) -> None:
    now = 0.0
    workers = LiveWorkers(bus, Backlog(bus, 60), clock=lambda: now)
    await bus.declare(topology.jobs_queue("m", "interactive"))
    last = announcement(tool_parser="hermes")
    workers.hear(last)

    now = topology.FORGET_AFTER_S + 1
    between = await workers.find("m")
    workers.forget_model("m")

    assert (workers.of_model("m"), between) == ([], last)
    assert await workers.find("m") is None


async def test_the_first_job_without_a_live_worker_is_a_warning_once_per_outage(
    bus: MemoryBus, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1_800_000_000.0)
    now = 0.0
    workers = LiveWorkers(bus, Backlog(bus, 60), clock=lambda: now)
    await bus.declare(topology.jobs_queue("m", "interactive"))
    job = new_job("m", TextPrompt(text="word"))
    job = msgspec.structs.replace(job, deadline=time.time() + 600)

    await workers.publish(job, "reply.x")  # its worker may not have been heard yet
    assert caplog.records == []

    now = 5.0
    for _ in range(3):
        await workers.publish(job, "reply.x")
    workers.hear(announcement())
    await workers.publish(job, "reply.x")
    now = 50.0
    await workers.publish(job, "reply.x")

    assert [record.message for record in caplog.records] == [
        "no live worker; requests wait until their deadlines"
    ] * 2
    facts = caplog.records[0].__dict__
    assert (facts["model"], facts["deadline_s"]) == ("m", 600)
