"""Watches every process during the traffic: whether it lives, and its memory."""

import asyncio
import logging
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple, Protocol

import psutil

logger = logging.getLogger(__name__)

SETTLED_AFTER_S = 300.0
"""Until then caches fill, and allocators take what the busiest moment needs."""
MAX_GROWTH_BYTES = 8 << 20
"""The maximum growth of settled memory.

Processes without leaks were observed to grow by 1 MiB in minutes, and by 4 while they warm up. Half
an hour of 20 requests per second finds a leak of 230 bytes per request.
"""
MIN_SETTLED_SAMPLES = 10
"""Fewer do not show whether memory grows."""
_LOOK_INTERVAL_S = 0.5
_NUM_SAMPLES = 360
_NUM_MEASURES = 40


class Process(Protocol):
    """A process that can be watched."""

    @property
    def pid(self) -> int: ...

    @property
    def is_alive(self) -> bool: ...


class Sample(NamedTuple):
    """The state of a process at a time, in seconds since the start of the traffic."""

    at_s: float
    memory_bytes: int


@dataclass
class Course:
    """The memory of a process during a run."""

    samples: list[Sample] = field(default_factory=list)

    def settled(self, duration_s: float) -> list[Sample]:
        """The samples after five minutes, or in the second half of a shorter run."""
        since_s = min(SETTLED_AFTER_S, duration_s / 2)
        return [sample for sample in self.samples if sample.at_s >= since_s]

    def growth_bytes(self, duration_s: float) -> float:
        """The growth of the settled memory, by a line that no single sample moves."""
        settled = self.settled(duration_s)
        if len(settled) < 2:
            return 0.0
        return slope(settled) * (settled[-1].at_s - settled[0].at_s)


def slope(samples: Sequence[Sample]) -> float:
    """Bytes per second: the median of the slopes between all pairs (Theil and Sen)."""
    return statistics.median(
        (later.memory_bytes - earlier.memory_bytes) / (later.at_s - earlier.at_s)
        for earlier, later in combinations(samples, 2)
    )


class Watch:
    """Watches ``processes``, by name. ``measures`` are further amounts of memory, which take long
    to measure."""

    def __init__(
        self,
        processes: Mapping[str, Process],
        duration_s: float,
        measures: Mapping[str, Callable[[], int]],
    ) -> None:
        self.courses = {name: Course() for name in (*processes, *measures)}
        self.deaths: list[str] = []
        self._processes = processes
        self._measures = measures
        self._duration_s = duration_s
        self._sample_interval_s = max(_LOOK_INTERVAL_S, duration_s / _NUM_SAMPLES)
        self._measure_interval_s = duration_s / _NUM_MEASURES

    async def run(self, is_over: asyncio.Event) -> None:
        """Sample for the duration, then set ``is_over``. That is later if there are not enough
        samples yet, as on a busy machine, and earlier if a process has ended."""
        began_at = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            measuring = tasks.create_task(self._measure(began_at))
            await self._look_until(is_over, began_at)
            measuring.cancel()

    async def _measure(self, began_at: float) -> None:
        while True:
            await asyncio.sleep(self._measure_interval_s)
            for name, measure in self._measures.items():
                try:
                    memory_bytes = await asyncio.to_thread(measure)
                except subprocess.TimeoutExpired:
                    logger.warning("%s could not be measured in time", name)
                    continue
                sample = Sample(time.monotonic() - began_at, memory_bytes)
                self.courses[name].samples.append(sample)

    async def _look_until(self, is_over: asyncio.Event, began_at: float) -> None:
        next_s = 0.0
        while not is_over.is_set():
            now_s = time.monotonic() - began_at
            self._look(now_s)
            if self.deaths or (now_s >= self._duration_s and self._has_enough()):
                is_over.set()
                return
            if now_s >= next_s:
                next_s += self._sample_interval_s
                self._sample(now_s)
            await asyncio.sleep(_LOOK_INTERVAL_S)

    def _look(self, now_s: float) -> None:
        for name, process in self._processes.items():
            if not process.is_alive:
                self.deaths.append(f"{name} (process {process.pid}) ended after {now_s:.0f} s")

    def _has_enough(self) -> bool:
        settled = (self.courses[name].settled(self._duration_s) for name in self._processes)
        return all(len(samples) >= MIN_SETTLED_SAMPLES for samples in settled)

    def _sample(self, now_s: float) -> None:
        for name, process in self._processes.items():
            with suppress(psutil.Error):  # the next sample finds that it has ended
                memory_bytes = psutil.Process(process.pid).memory_info().rss
                self.courses[name].samples.append(Sample(now_s, memory_bytes))
