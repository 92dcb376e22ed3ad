"""What is known about workers from their announcements."""

import pytest

from gateway.fleet.live_workers import Backlog, LiveWorkers
from shared.bus.memory import MemoryBus
from tests.gateway.fleet.announcements import announcement


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
