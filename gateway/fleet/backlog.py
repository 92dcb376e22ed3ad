"""Estimates how long a new request would wait: queue depth divided by the workers' throughput.

A worker's throughput is measured only while all its sequence slots are in use; otherwise it
reflects demand rather than capacity.
"""

import asyncio
import math
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from shared import incidents, topology
from shared.bus.base import Bus
from shared.errors import BusError, Overloaded
from shared.messages import Announcement

_LOOK_INTERVAL_S = 0.1
_STALE_AFTER_S = 1.0
_HALF_LIFE_S = 30.0
_MAX_RETRY_AFTER_S = 60.0
_FORGET_AFTER_S = 60.0


@dataclass(slots=True)
class _Rate:
    """The throughput of one worker while it was busy, with exponential decay."""

    last: Announcement
    heard_at: float
    num_answered: float = 0.0
    busy_s: float = 0.0

    @property
    def is_busy(self) -> bool:
        return _is_busy(self.last)

    def hear(self, announcement: Announcement, now: float) -> None:
        num_answered = announcement.num_answered - self.last.num_answered
        if self.is_busy and _is_busy(announcement) and num_answered >= 0:
            elapsed_s = now - self.heard_at
            decay = 0.5 ** (elapsed_s / _HALF_LIFE_S)
            self.num_answered = self.num_answered * decay + num_answered
            self.busy_s = self.busy_s * decay + elapsed_s
        self.last, self.heard_at = announcement, now


@dataclass(slots=True)
class _Depth:
    """The measured queue depth of one model, and the jobs admitted since."""

    num_waiting: int = 0
    counted_at: float = -math.inf
    num_admitted: int = 0
    looking: "asyncio.Task[None] | None" = None


class Backlog:
    """Rejects requests that would wait too long. It adds no latency: the depth is measured in the
    background, and only while there are requests."""

    def __init__(self, bus: Bus, max_wait_s: float) -> None:
        self._bus = bus
        self._max_wait_s = max_wait_s
        self._rates: dict[str, _Rate] = {}
        self._depths: dict[str, _Depth] = {}

    def hear(self, announcement: Announcement) -> None:
        """Record the progress of a worker."""
        now = time.monotonic()
        known = self._rates.get(announcement.worker)
        if announcement.is_leaving:
            self._rates.pop(announcement.worker, None)
        elif known is None:
            self._forget(now)
            self._rates[announcement.worker] = _Rate(announcement, now)
        else:
            known.hear(announcement, now)

    def _forget(self, now: float) -> None:
        """Forget workers that died without a final announcement."""
        for worker, rate in list(self._rates.items()):
            if now - rate.heard_at > _FORGET_AFTER_S:
                del self._rates[worker]

    def admit(self, model: str, workers: Iterable[str]) -> None:
        """Count a request for ``model``, which ``workers`` serve. Raises `Overloaded` with the time
        after which it would be accepted."""
        now = time.monotonic()
        depth = self._depths.setdefault(model, _Depth())
        if now - depth.counted_at > _LOOK_INTERVAL_S and depth.looking is None:
            depth.looking = asyncio.create_task(self._look(model, depth))
        if now - depth.counted_at < _STALE_AFTER_S:
            wait_s = self._wait_s(depth, workers)
            if wait_s > self._max_wait_s:
                retry_after_s = min(max(wait_s - self._max_wait_s, 1.0), _MAX_RETRY_AFTER_S)
                raise Overloaded(
                    "Too many requests are waiting for this model.", retry_after_s=retry_after_s
                )
        depth.num_admitted += 1

    def _wait_s(self, depth: _Depth, workers: Iterable[str]) -> float:
        """The estimated wait for the queue; 0 if a worker has free slots."""
        num_waiting = depth.num_waiting + depth.num_admitted
        if not depth.num_waiting:
            return 0.0
        rates = [self._rates.get(worker) for worker in workers]
        known = [rate for rate in rates if rate is not None and rate.is_busy and rate.busy_s > 0]
        if len(known) < len(rates):
            return 0.0
        per_s = sum(rate.num_answered / rate.busy_s for rate in known)
        if per_s:
            return num_waiting / per_s
        # No answers so far: the wait is at least as long as the workers have been busy.
        return min(rate.busy_s for rate in known)

    async def _look(self, model: str, depth: _Depth) -> None:
        num_before = depth.num_admitted
        try:
            facts = {"model": model}
            with incidents.survived("task", "queue not inspected", **facts), suppress(BusError):
                state = await self._bus.inspect(topology.jobs_queue(model, "interactive").name)
                depth.num_waiting = state.num_ready if state is not None else 0
                depth.num_admitted -= num_before
                depth.counted_at = time.monotonic()
        finally:
            depth.looking = None


def _is_busy(announcement: Announcement) -> bool:
    return announcement.num_running + announcement.num_waiting >= announcement.max_num_seqs
