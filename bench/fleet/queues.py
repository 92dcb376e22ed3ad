"""The broker's CPU time for the queue of a request, with few and with many other queues, and for a
job in a quorum queue."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from bench.fleet.deployment import Deployment, Meter, deployed
from shared import topology
from shared.bus.base import Consumer, Message
from shared.bus.rabbit import RabbitBus

_AT_ONCE = 8
_NUMBERS = itertools.count()
_JOB_BYTES = 1000


@dataclass(frozen=True, kw_only=True)
class QueuePoint:
    """What a queue costs beside others: declared, bound, consumed, and deleted."""

    num_nodes: int
    num_present: int
    """Other queues."""
    cpu_s: float
    """The CPU time of all nodes together for a queue."""
    per_s: float
    """Queues in a second, with 8 at once."""
    others: float


@dataclass(frozen=True, kw_only=True)
class JobPoint:
    """What a job in a quorum queue costs: published, confirmed, delivered, and acknowledged."""

    num_nodes: int
    cpu_s: float
    """The CPU time of all nodes together for a job."""
    per_s: float
    others: float


@dataclass(frozen=True, kw_only=True)
class Queues:
    queues: Sequence[QueuePoint]
    jobs: Sequence[JobPoint]


async def measure_queues(
    numbers_of_nodes: Sequence[int], numbers_present: Sequence[int], num_repeats: int
) -> Queues:
    queues: list[QueuePoint] = []
    jobs: list[JobPoint] = []
    for num_nodes in numbers_of_nodes:
        with deployed(num_nodes=num_nodes, num_gateways=0) as deployment:
            async with RabbitBus(deployment.url) as bus:
                jobs.append(await _measure_jobs(deployment, bus, num_repeats))
                queues += await _measure_queues(deployment, bus, numbers_present, num_repeats)
    return Queues(queues=queues, jobs=jobs)


async def _measure_queues(
    deployment: Deployment, bus: RabbitBus, numbers_present: Sequence[int], num_repeats: int
) -> list[QueuePoint]:
    points: list[QueuePoint] = []
    num_present = 0
    for number in numbers_present:
        await _repeat(lambda: _declare(bus), number - num_present)
        num_present = number
        cpu_s, per_s, others = await _broker_cpu(deployment, lambda: _use_once(bus), num_repeats)
        points.append(
            QueuePoint(
                num_nodes=len(deployment.nodes),
                num_present=number,
                cpu_s=cpu_s,
                per_s=per_s,
                others=others,
            )
        )
    return points


async def _measure_jobs(deployment: Deployment, bus: RabbitBus, num_repeats: int) -> JobPoint:
    queue = topology.jobs_queue("echo", "interactive")
    await bus.declare(queue)
    async with bus.consume(queue.name, prefetch=_AT_ONCE) as deliveries:
        acknowledging = asyncio.create_task(_acknowledge(deliveries))
        message = Message(bytes(_JOB_BYTES))
        cpu_s, per_s, others = await _broker_cpu(
            deployment, lambda: bus.publish(queue.bindings[0], message), num_repeats
        )
        acknowledging.cancel()
    return JobPoint(num_nodes=len(deployment.nodes), cpu_s=cpu_s, per_s=per_s, others=others)


async def _acknowledge(deliveries: Consumer) -> None:
    async for delivery in deliveries:
        await delivery.ack()


async def _broker_cpu(
    deployment: Deployment, act: Callable[[], Awaitable[object]], num_repeats: int
) -> tuple[float, float, float]:
    """The broker's CPU seconds for an act, acts per second, and the cores that other processes
    used."""
    await _repeat(act, _AT_ONCE)
    await asyncio.sleep(1)
    idle = Meter(deployment)
    await asyncio.sleep(2)
    idle_cores = idle.read().cores["broker"]
    meter, start = Meter(deployment), time.monotonic()
    await _repeat(act, num_repeats)
    elapsed_s = time.monotonic() - start
    await asyncio.sleep(1)  # what the broker does afterwards
    used = meter.read()
    busy_s = (used.cores["broker"] - idle_cores) * used.seconds
    return busy_s / num_repeats, num_repeats / elapsed_s, used.others


async def _repeat(act: Callable[[], Awaitable[object]], num_repeats: int) -> None:
    """Act several times, a few of them at once."""
    pending = iter(range(num_repeats))

    async def keep_acting() -> None:
        for _ in pending:
            await act()

    async with asyncio.TaskGroup() as group:
        for _ in range(_AT_ONCE):
            group.create_task(keep_acting())


async def _declare(bus: RabbitBus) -> str:
    """Declare and bind a reply queue; returns its name."""
    queue = topology.reply_queue(f"fleet-{next(_NUMBERS)}", expires_s=3600)
    await bus.declare(queue)
    return queue.name


async def _use_once(bus: RabbitBus) -> None:
    name = await _declare(bus)
    async with bus.consume(name, is_exclusive=True):
        pass
    await bus.delete_queue(name)
