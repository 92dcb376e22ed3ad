"""The queues as a gateway's metrics show them: the jobs of every publisher."""

import time
from collections.abc import AsyncIterator

import pytest

from gateway.fleet.live_workers import Backlog, LiveWorkers
from gateway.fleet.queue_watch import QueueWatch
from shared import dead_letters, topology
from shared.bus.base import QueueState
from shared.bus.memory import MemoryBus
from shared.errors import BusUnavailable, QueueDown
from shared.messages import Announcement, JobClass
from tests.support.workers.jobs import dead_letter, new_job, publish

MODEL = "m"


def announcement(**more: object) -> Announcement:
    return Announcement(
        worker="worker.1",
        model=MODEL,
        vocab_size=9,
        max_seq_len=8,
        fingerprint="f",
        max_num_seqs=4,
        **more,  # type: ignore[arg-type]
    )


@pytest.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    async with MemoryBus() as bus:
        await topology.declare_worker(bus, MODEL, "1")
        yield bus


@pytest.fixture
def workers(bus: MemoryBus) -> LiveWorkers:
    workers = LiveWorkers(bus, Backlog(bus, 60))
    workers.hear(announcement(mean_job_tokens=50.0, mean_job_work_s=0.25))
    return workers


@pytest.fixture
def watch(bus: MemoryBus, workers: LiveWorkers) -> QueueWatch:
    return QueueWatch(bus, workers)


async def test_jobs_of_other_publishers_count(bus: MemoryBus, watch: QueueWatch) -> None:
    await publish(bus, new_job(MODEL), "batch")
    await publish(bus, new_job(MODEL), "batch")

    await watch.look()

    waiting = {lane: reading.num_waiting for (_, lane), reading in watch.readings.items()}
    assert waiting == {"interactive": 0, "batch": 2, "quick": 0, "suspect": 0}
    assert watch.num_tokens_waiting(MODEL, "batch") == 100
    assert watch.work_s_waiting(MODEL, "batch") == 0.5


@pytest.mark.parametrize("job_class", topology.JOB_CLASSES)
async def test_jobs_that_were_set_aside_wait_too(
    job_class: JobClass, bus: MemoryBus, watch: QueueWatch
) -> None:
    await publish(bus, new_job(MODEL), job_class)
    await publish(bus, new_job(MODEL), topology.OVERFLOW[job_class])

    await watch.look()

    assert watch.readings[MODEL, job_class].num_waiting == 2


async def test_a_waiting_job_is_newer_than_the_newest_that_was_taken(
    bus: MemoryBus, workers: LiveWorkers, watch: QueueWatch
) -> None:
    await publish(bus, new_job(MODEL))
    workers.hear(announcement(newest_taken={"interactive": time.time() - 30}))

    await watch.look()

    assert 29 < watch.readings[MODEL, "interactive"].oldest_age_s < 60
    assert watch.readings[MODEL, "batch"].oldest_age_s == 0


async def test_a_waiting_job_came_after_the_queue_was_empty(
    bus: MemoryBus, workers: LiveWorkers, watch: QueueWatch
) -> None:
    workers.hear(announcement(newest_taken={"interactive": time.time() - 300}))
    await watch.look()
    await publish(bus, new_job(MODEL))

    await watch.look()

    assert watch.readings[MODEL, "interactive"].oldest_age_s < 60


async def test_queues_of_a_model_without_workers_are_watched(
    bus: MemoryBus, workers: LiveWorkers, watch: QueueWatch
) -> None:
    workers.hear(announcement(is_leaving=True))
    await publish(bus, new_job(MODEL))

    await watch.look()

    assert watch.readings[MODEL, "interactive"].num_waiting == 1


async def test_models_with_queues_are_recalled(bus: MemoryBus) -> None:
    workers = LiveWorkers(bus, Backlog(bus, 60))
    watch = QueueWatch(bus, workers)

    watch.recall({"unknown": 1.0, MODEL: 2.0})
    await watch.look()

    assert workers.known_models == {MODEL: 2.0}
    assert set(watch.readings) == {(MODEL, lane) for lane in topology.LANES}
    assert await bus.inspect(topology.jobs_queue("unknown", "interactive").name) is None


async def test_models_are_recalled_although_the_broker_is_away_at_first(bus: MemoryBus) -> None:
    workers = LiveWorkers(bus, Backlog(bus, 60))
    watch = QueueWatch(bus, workers)
    watch.recall({MODEL: 2.0})
    bus.sever()
    with pytest.raises(BusUnavailable):
        await watch.look()
    await bus.wait_connected()

    await watch.look()

    assert workers.known_models == {MODEL: 2.0}


async def test_a_model_is_seen_as_long_as_jobs_wait_for_it(bus: MemoryBus) -> None:
    workers = LiveWorkers(bus, Backlog(bus, 60))
    watch = QueueWatch(bus, workers)
    watch.recall({MODEL: 2.0})
    await publish(bus, new_job(MODEL), "batch")
    now = time.time()

    await watch.look()

    assert workers.known_models[MODEL] >= now


async def test_a_model_whose_queue_was_deleted_is_forgotten(
    bus: MemoryBus, workers: LiveWorkers, watch: QueueWatch
) -> None:
    await bus.delete_queue(topology.jobs_queue(MODEL, "interactive").name)

    await watch.look()

    assert (watch.readings, workers.known_models) == ({}, {})


async def test_dead_letters_that_are_being_listed_still_count(
    bus: MemoryBus, watch: QueueWatch
) -> None:
    await dead_letter(bus, "one")
    await watch.look()

    async with dead_letters.opened(bus, 10) as letters:
        await watch.look()
        while_listed = watch.num_dead
        await letters[0].drop()
    await watch.look()

    assert (while_listed, watch.num_dead) == (1, 0)


async def test_a_broker_that_is_away_is_an_error(bus: MemoryBus, watch: QueueWatch) -> None:
    bus.sever()

    with pytest.raises(BusUnavailable):
        await watch.look()


async def test_a_queue_whose_node_is_down_hides_no_other(
    bus: MemoryBus, workers: LiveWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    down = {topology.jobs_queue("down", lane).name for lane in topology.LANES}
    inspect = bus.inspect

    async def inspect_others(queue: str) -> QueueState | None:
        if queue in down:
            raise QueueDown(f"the node of {queue} is down")
        return await inspect(queue)

    monkeypatch.setattr(bus, "inspect", inspect_others)
    watch = QueueWatch(bus, workers)

    watch.recall({"down": 1.0, MODEL: 2.0})
    await watch.look()

    assert {"down", MODEL} <= workers.known_models.keys()
    assert (MODEL, "interactive") in watch.readings
    assert ("down", "interactive") not in watch.readings
