"""What the announcements of many workers cost a gateway and a worker.

A gateway and a worker are real. All other workers are consumers of the model's queue for quick jobs
and announcements, each every two seconds, and not all at once.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace

from bench.echo_worker import MODEL, synthetic_tokenizer
from bench.fleet.deployment import Deployment, Meter, deployed
from bench.fleet.point import Point, point_of
from cli.terminal import notices
from shared import topology
from shared.bus.base import Binding, Bus, Message
from shared.bus.rabbit import RabbitBus
from shared.errors import Unroutable
from shared.messages import Announcement, encode
from worker.process.peers import num_groups

_SETTLE_S = 3 * topology.FORGET_AFTER_S
"""After which the worker listens to its group."""
_SLOTS = 8
_STEP_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Announcements:
    """The numbers of workers, beginning with the real worker alone, which shows what the processes
    take anyway."""

    points: Sequence[Point]


async def measure_announcements(num_others: Sequence[int], seconds: float) -> Announcements:
    """The cores while so many others announce themselves."""
    with deployed(num_nodes=1, num_gateways=1) as deployment:
        await asyncio.to_thread(deployment.add_workers, 1, step_s=_STEP_S, num_slots=_SLOTS)
        points = [await measure_beside(deployment, 0, seconds, settle_s=0)]
        points += [
            await measure_beside(deployment, number, seconds, settle_s=_SETTLE_S)
            for number in num_others
        ]
    return Announcements(points=points)


async def measure_beside(
    deployment: Deployment, num_others: int, seconds: float, *, settle_s: float
) -> Point:
    """The cores of a deployment beside so many workers, measured ``settle_s`` after their start."""
    async with _others(deployment, num_others):
        await asyncio.sleep(settle_s)
        meter = Meter(deployment)
        await asyncio.sleep(seconds)
        used = meter.read()
    parts = ", ".join(f"{role} {cores:.4f}" for role, cores in used.cores.items())
    notices.print(f"  {num_others} other workers: {parts} cores")
    return replace(point_of(deployment, used), num_workers=len(deployment.workers) + num_others)


@asynccontextmanager
async def _others(deployment: Deployment, num_workers: int) -> AsyncIterator[None]:
    """Other workers, until the end of the ``async with``."""
    quick = topology.jobs_queue(MODEL, "quick").name
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(RabbitBus(deployment.url))
        for _ in range(num_workers):
            await stack.enter_async_context(bus.consume(quick, prefetch=1))
        announcing = asyncio.create_task(_announce(bus, num_workers))
        yield
        announcing.cancel()
        await asyncio.wait([announcing])


async def _announce(bus: Bus, num_workers: int) -> None:
    """Announce workers in turn to gateways and to their groups, until cancelled."""
    if not num_workers:
        return
    vocab_size = synthetic_tokenizer().vocab_size
    groups = num_groups(1 + num_workers)
    pause_s = topology.ANNOUNCE_INTERVAL_S / num_workers
    began_at, unix_began_at = time.monotonic(), time.time()
    async with asyncio.TaskGroup() as publishing:
        for turn in itertools.count():
            await asyncio.sleep(began_at + turn * pause_s - time.monotonic())
            worker_id = f"{turn % num_workers:032x}"
            announcement = Announcement(
                worker=f"worker.{worker_id}",
                model=MODEL,
                vocab_size=vocab_size,
                max_seq_len=8192,
                fingerprint=MODEL,
                numerics=MODEL,
                is_exact=True,
                max_num_seqs=_SLOTS,
                num_running=turn % (_SLOTS + 1),
                num_answered=turn // num_workers,
                kv_usage=turn % 7 / 7,
                newest_taken={"interactive": time.time()},
                mean_job_tokens=300.0,
                mean_job_work_s=1.5,
                takes_near_jobs=True,
                started_at=unix_began_at,
                sent_at=time.time(),
            )
            message = Message(encode(announcement))
            group = topology.group_binding(MODEL, groups, worker_id)
            publishing.create_task(_publish(bus, message, topology.ANNOUNCEMENTS, group))


async def _publish(bus: Bus, message: Message, *bindings: Binding) -> None:
    for binding in bindings:
        with suppress(Unroutable):  # no worker of this group is real
            await bus.publish(binding, message)
