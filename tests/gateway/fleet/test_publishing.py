"""The queue to which a gateway publishes a generation."""

from dataclasses import replace

import msgspec
import pytest
from prometheus_client import generate_latest

from gateway.fleet.live_workers import Backlog, LiveWorkers
from shared import topology
from shared.bus.base import Queue
from shared.bus.memory import MemoryBus
from shared.errors import ModelNotFound
from shared.messages import GenerationJob, JobClass, TextPrompt
from shared.telemetry.metrics import Catalog
from tests.gateway.fleet.announcements import announcement
from tests.support.workers.jobs import new_job, num_ready

MODEL = "m"
LONG = new_job(MODEL, TextPrompt(text="word " * 500))
SHORT = new_job(MODEL, TextPrompt(text="word"))
AGAIN = msgspec.structs.replace(LONG, publication=1)


def near_queue(name: str) -> Queue:
    """A worker's queue, in which jobs stay."""
    return replace(topology.near_queue(MODEL, f"worker.{name}"), ttl_s=None)


NEAR = [near_queue("a"), near_queue("b")]
SHARED = [topology.jobs_queue(MODEL, job_class) for job_class in topology.JOB_CLASSES]


def gateway(
    bus: MemoryBus, *workers: str, has_affinity: bool = True, catalog: Catalog | None = None
) -> LiveWorkers:
    """A gateway that has heard these workers."""
    live = LiveWorkers(
        bus, Backlog(bus, 60), catalog=catalog or Catalog(), has_affinity=has_affinity
    )
    for name in workers:
        live.hear(announcement(name, model=MODEL, takes_near_jobs=True))
    return live


async def num_jobs(bus: MemoryBus, queues: list[Queue]) -> int:
    return sum([await num_ready(bus, queue.name) for queue in queues])


async def test_a_conversation_goes_to_the_same_worker_from_all_gateways(bus: MemoryBus) -> None:
    await bus.declare(*SHARED, *NEAR)

    for _ in range(3):
        await gateway(bus, "a", "b").publish(LONG, "reply.x")
        await gateway(bus, "b", "a").publish(LONG, "reply.x")

    assert sorted([await num_ready(bus, queue.name) for queue in NEAR]) == [0, 6]


@pytest.mark.parametrize(
    ("job", "lane", "workers", "has_affinity"),
    [
        pytest.param(LONG, "batch", "ab", True, id="batch"),
        pytest.param(SHORT, "interactive", "ab", True, id="short"),
        pytest.param(AGAIN, "interactive", "ab", True, id="published again"),
        pytest.param(LONG, "interactive", "a", True, id="one worker"),
        pytest.param(LONG, "interactive", "ab", False, id="turned off"),
    ],
)
async def test_other_jobs_go_to_all_workers(
    bus: MemoryBus, job: GenerationJob, lane: JobClass, workers: str, has_affinity: bool
) -> None:
    await bus.declare(*SHARED, *NEAR)

    await gateway(bus, *workers, has_affinity=has_affinity).publish(job, "reply.x", lane)

    assert await num_ready(bus, topology.jobs_queue(MODEL, lane).name) == 1
    assert await num_jobs(bus, NEAR) == 0


async def test_a_job_goes_to_all_workers_if_the_targets_queue_is_gone(bus: MemoryBus) -> None:
    await bus.declare(*SHARED)

    await gateway(bus, "a", "b").publish(LONG, "reply.x")

    assert await num_jobs(bus, SHARED) == 1


async def test_a_job_goes_to_all_workers_if_the_targets_queue_is_full(bus: MemoryBus) -> None:
    await bus.declare(*SHARED, *(replace(queue, max_length=0) for queue in NEAR))

    await gateway(bus, "a", "b").publish(LONG, "reply.x")

    assert await num_jobs(bus, SHARED) == 1


async def test_a_model_without_queues_does_not_exist(bus: MemoryBus) -> None:
    with pytest.raises(ModelNotFound):
        await gateway(bus, "a", "b").publish(LONG, "reply.x")


async def test_jobs_are_counted_by_their_route(bus: MemoryBus) -> None:
    await bus.declare(*SHARED, *NEAR)
    catalog = Catalog()
    publishing = gateway(bus, "a", "b", catalog=catalog)

    for job in (LONG, LONG, SHORT):
        await publishing.publish(job, "reply.x")

    counted = generate_latest(catalog.registry).decode()
    assert f'warren_gateway_jobs_published_total{{model="{MODEL}",route="near"}} 2.0' in counted
    assert f'warren_gateway_jobs_published_total{{model="{MODEL}",route="shared"}} 1.0' in counted
