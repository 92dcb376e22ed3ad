"""Streams at the speed at which people read, from a few to as many as the machine carries.

The workers pace their events as real workers do. These loads show how much of the cost of an event
is waking up: `cli.size.costs.Cost.wakeups_per_s`.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.fleet.deployment import Deployment, Meter, deployed
from bench.fleet.point import Point, point_of
from bench.fleet.users import users
from cli.terminal import notices


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The processes of a deployment, and its loads."""

    num_nodes: int
    num_gateways: int
    num_workers: int
    num_streams: Sequence[int]
    """At once, rising."""

    @property
    def num_slots(self) -> int:
        """The slots of a worker. Jobs are not spread evenly over the workers."""
        return 8 + 2 * max(self.num_streams) // self.num_workers


LAYOUTS = (
    Layout(num_nodes=1, num_gateways=1, num_workers=1, num_streams=(10, 60, 120, 200, 280)),
    Layout(num_nodes=1, num_gateways=2, num_workers=4, num_streams=(10, 60, 120, 200, 240)),
    Layout(num_nodes=3, num_gateways=2, num_workers=4, num_streams=(10, 60, 120, 160)),
)


def alone(num_streams: Sequence[int]) -> Sequence[Layout]:
    """A process of each kind, with other loads."""
    return [replace(LAYOUTS[0], num_streams=num_streams)]


@dataclass(frozen=True, kw_only=True)
class DenseFleet:
    """The loads of all layouts, each after its idle deployment."""

    points: Sequence[Point]


@dataclass(frozen=True, kw_only=True)
class DensePlan:
    """The loads to measure."""

    layouts: Sequence[Layout]
    answer_tokens: int = 200
    short_tokens: int = 50
    """The length of the answers of a further load, which shows what a request costs."""
    step_s: float = 0.05
    seconds: float = 10.0
    """Seconds to measure each load."""


async def measure_dense(plan: DensePlan) -> DenseFleet:
    """Raises `bench.load.LoadError` if an answer fails or differs from the others."""
    points: list[Point] = []
    for layout in plan.layouts:
        with deployed(num_nodes=layout.num_nodes, num_gateways=layout.num_gateways) as deployment:
            await asyncio.to_thread(
                deployment.add_workers,
                layout.num_workers,
                step_s=plan.step_s,
                num_slots=layout.num_slots,
                is_paced=True,
            )
            points += await measure_loads(plan, deployment, layout.num_streams)
    return DenseFleet(points=points)


async def measure_loads(
    plan: DensePlan, deployment: Deployment, num_streams: Sequence[int]
) -> Sequence[Point]:
    """The points of one layout."""
    await asyncio.sleep(plan.seconds / 4)
    meter = Meter(deployment)
    await asyncio.sleep(plan.seconds / 2)
    points = [point_of(deployment, meter.read())]
    middle = num_streams[len(num_streams) // 2]
    loads = [*((number, plan.answer_tokens) for number in num_streams), (middle, plan.short_tokens)]
    return points + [await _loaded(plan, deployment, *load) for load in loads]


async def _loaded(
    plan: DensePlan, deployment: Deployment, num_streams: int, answer_tokens: int
) -> Point:
    answer_s = answer_tokens * plan.step_s
    async with users(deployment.urls, answer_tokens) as load:
        # Not all at once, so that the answers do not all end at once.
        for _ in range(num_streams):
            load.add(1)
            await asyncio.sleep(answer_s / num_streams)
        meter = Meter(deployment)
        received = await load.measure(plan.seconds)
        used = meter.read()
    point = point_of(deployment, used, answer_tokens, received)
    notices.print(
        f"  {point.num_nodes} nodes, {point.num_gateways} gateways, {point.num_workers} workers, "
        f"{num_streams} streams of {answer_tokens} tokens: {received.events_per_s:.0f} events/s"
    )
    return point
