"""Throughput by the number of workers, and the cores that each kind of process uses.

Users keep all slots of all workers in use. Workers join and leave under load.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

from bench.fleet.deployment import Deployment, Meter, deployed
from bench.fleet.point import Point, point_of
from bench.fleet.users import FleetUsers, users
from cli.terminal import notices
from tests.support.deployment.processes import NO_TLS

_RUNNING = "warren_worker_sequences_running{"
_POLL_S = 0.02
_NUM_JOINS = 2
"""Joining is measured between the first numbers of workers, and leaving after them, while no core
is full."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The points, and what joining and leaving under load took."""

    points: Sequence[Point]
    joined_s: Sequence[float]
    """From a worker's being ready to its first job, with all other workers full."""
    num_left: int
    """Workers that were stopped under load: no request failed or changed."""


@dataclass(frozen=True, kw_only=True)
class CurvePlan:
    """The loads and the deployment to measure."""

    num_workers: Sequence[int]
    """Rising."""
    other_tokens: Sequence[int]
    """Lengths of answers that are measured beside `answer_tokens`, with a middle number of
    workers."""
    num_gateways: int = 2
    answer_tokens: int = 48
    num_slots: int = 8
    """Slots of each worker."""
    step_s: float = 0.3
    seconds: float = 8.0
    """Seconds to measure each load."""


async def measure_curve(plan: CurvePlan) -> Curve:
    with deployed(num_nodes=1, num_gateways=plan.num_gateways) as deployment:
        return await _Measurement(plan, deployment).run()


class _Measurement:
    def __init__(self, plan: CurvePlan, deployment: Deployment) -> None:
        self._plan = plan
        self._deployment = deployment

    async def run(self) -> Curve:
        numbers = self._plan.num_workers
        points: list[Point] = []
        joined_s: list[float] = []
        num_left = 0
        for k, number in enumerate(numbers):
            if 0 < k <= _NUM_JOINS:
                joined_s.append(await self._join())
            await self._add_workers(number - len(self._deployment.workers))
            points.append(await self._idle())
            points.append(await self._loaded(self._plan.answer_tokens))
            if k == len(numbers) // 2:
                points += [await self._loaded(tokens) for tokens in self._plan.other_tokens]
            if number > 1 and k == min(_NUM_JOINS, len(numbers) - 1):
                await self._leave()
                num_left += 1
        return Curve(points=points, joined_s=joined_s, num_left=num_left)

    async def _add_workers(self, num_workers: int) -> None:
        step_s, num_slots = self._plan.step_s, self._plan.num_slots
        await asyncio.to_thread(
            self._deployment.add_workers, num_workers, step_s=step_s, num_slots=num_slots
        )

    async def _idle(self) -> Point:
        await asyncio.sleep(self._plan.seconds / 4)
        meter = Meter(self._deployment)
        await asyncio.sleep(self._plan.seconds / 2)
        return point_of(self._deployment, meter.read())

    async def _loaded(self, answer_tokens: int) -> Point:
        async with self._users(answer_tokens) as load:
            await asyncio.sleep(self._answer_s(answer_tokens))  # until answers end
            meter = Meter(self._deployment)
            received = await load.measure(
                max(self._plan.seconds, answer_tokens * self._plan.step_s)
            )
            used = meter.read()
        about = f"{len(self._deployment.workers)} workers, {answer_tokens} tokens"
        notices.print(f"  {about}: {received.tokens_per_s:.0f} tok/s")
        return point_of(self._deployment, used, answer_tokens, received)

    @asynccontextmanager
    async def _users(self, answer_tokens: int) -> AsyncIterator[FleetUsers]:
        """A quarter more users than slots, once all slots are in use."""
        async with users(self._deployment.urls, answer_tokens) as load:
            num_users = len(self._deployment.workers) * self._plan.num_slots * 5 // 4
            answer_s = self._answer_s(answer_tokens)
            # Not all at once, so that the answers do not all end at once.
            for _ in range(num_users):
                load.add(1)
                await asyncio.sleep(answer_s / num_users)
            yield load

    def _answer_s(self, answer_tokens: int) -> float:
        return (answer_tokens + 2) * self._plan.step_s

    async def _join(self) -> float:
        """Add a worker while all others are full; returns the seconds to its first job."""
        async with (
            self._users(self._plan.answer_tokens) as load,
            httpx.AsyncClient(verify=NO_TLS) as client,
        ):
            await self._add_workers(1)
            ready = time.monotonic()
            metrics = f"{self._deployment.workers[-1].url}/metrics"
            while not _is_running(await client.get(metrics)):
                load.check()
                await asyncio.sleep(_POLL_S)
            return time.monotonic() - ready

    async def _leave(self) -> None:
        """Stop a worker under load. Raises `LoadError` if a request fails."""
        async with self._users(self._plan.answer_tokens) as load:
            await asyncio.to_thread(self._deployment.end_worker)
            await load.measure(self._plan.answer_tokens * self._plan.step_s)


def _is_running(metrics: httpx.Response) -> bool:
    lines = metrics.text.splitlines()
    return any(line.startswith(_RUNNING) and float(line.split()[-1]) > 0 for line in lines)
