"""What is known about workers from their announcements."""

import pytest

from gateway.fleet.live_workers import Backlog, LiveWorkers
from shared.bus.memory import MemoryBus
from shared.messages import Announcement


def announcement(num_running: int) -> Announcement:
    return Announcement(
        worker="worker.a",
        model="m",
        vocab_size=1,
        max_seq_len=1,
        fingerprint="",
        max_num_seqs=8,
        num_running=num_running,
    )


def test_the_load_of_a_worker_is_that_of_the_last_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("gateway.fleet.live_workers.time.monotonic", lambda: now)
    workers = LiveWorkers(MemoryBus(), Backlog(MemoryBus(), 60))
    means = []

    for num_running in (4, 4, 0, *[0] * 9, 8):
        workers.hear(announcement(num_running))
        ((_, mean_used),) = workers.candidates("m")
        means.append(mean_used)
        now += 2.0

    assert means[:2] == [4.0, 4.0]
    assert means[11] == pytest.approx(4 / 2)  # after 20 s
    assert means[11] < means[12] < 3
