"""What was measured, what it is compared with, and how times are taken."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

Work = Callable[[], object]

_MIN_REPETITIONS = 5
_SECONDS = {"cuda": 0.3, "cpu": 0.0}
"""Seconds for which work is repeated. On the CPU, a figure only shows that it can be measured."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A row of the table."""

    section: str
    name: str
    value: float | None
    """None if it could not be measured; ``note`` gives the reason."""
    unit: str
    ratio: float | None = None
    goal: float | None = None
    """The minimum of the ratio."""
    note: str = ""
    """What the ratio is relative to, or what failed."""

    @property
    def is_failure(self) -> bool:
        """Whether something does not work, as opposed to being slow."""
        return self.ratio == 0.0 and self.goal == 1.0

    @property
    def is_met(self) -> bool | None:
        """None if there is no goal."""
        if self.goal is None:
            return None
        return self.ratio is not None and self.ratio >= self.goal


def failure(section: str, name: str, error: Exception) -> Figure:
    """The row of a measurement that raised."""
    note = f"{type(error).__name__}: {error}"[:120]
    return Figure(section=section, name=name, value=None, unit="", ratio=0.0, goal=1.0, note=note)


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """The measured limits of the device."""

    bytes_per_s: float
    flops_per_s: float

    def floor_ms(self, num_bytes: float, num_flops: float = 0.0) -> float:
        """The minimum time for this many bytes and operations: the larger of the two."""
        return 1e3 * max(num_bytes / self.bytes_per_s, num_flops / self.flops_per_s)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Return unused memory that torch has cached."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def median_ms(work: Work, device: torch.device) -> float:
    """The median time of several runs after a first run, in milliseconds. Waits for the device."""
    work()
    taken: list[float] = []
    until = time.perf_counter() + _SECONDS[device.type]
    while len(taken) < _MIN_REPETITIONS or time.perf_counter() < until:
        taken.append(_once_ms(work, device))
    return statistics.median(taken)


def _once_ms(work: Work, device: torch.device) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        work()
        return (time.perf_counter() - began) * 1e3
    start, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def device_ms(work: Work, device: torch.device, *, repeat: int = 10) -> float:
    """Seconds of the device alone: launches are captured in a graph if the device has graphs."""
    if device.type != "cuda":
        return median_ms(work, device)
    work()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeat):
            work()
    return median_ms(graph.replay, device) / repeat


@contextmanager
def seconds_of(device: torch.device) -> Iterator[Callable[[], float]]:
    """Seconds that the block took, including the device's work. Read it after the block."""
    synchronize(device)
    began = time.perf_counter()
    ended: list[float] = []
    yield lambda: ended[0] - began
    synchronize(device)
    ended.append(time.perf_counter())
