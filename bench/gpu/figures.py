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
"""For which a work is repeated; on the CPU a figure only shows that it can be taken."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One line of the table."""

    section: str
    name: str
    value: float | None
    """None where it could not be measured; ``note`` says why."""
    unit: str
    ratio: float | None = None
    goal: float | None = None
    """Of the ratio: at least."""
    note: str = ""
    """What the ratio is to, or what went wrong."""

    @property
    def is_failure(self) -> bool:
        """Whether it says that something does not work, not merely that it is slow."""
        return self.ratio == 0.0 and self.goal == 1.0

    @property
    def is_met(self) -> bool | None:
        """None where there is no goal."""
        if self.goal is None:
            return None
        return self.ratio is not None and self.ratio >= self.goal


def failure(section: str, name: str, error: Exception) -> Figure:
    """The line of something that raised."""
    note = f"{type(error).__name__}: {error}"[:120]
    return Figure(section=section, name=name, value=None, unit="", ratio=0.0, goal=1.0, note=note)


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What this device can do at most, as measured."""

    bytes_per_s: float
    flops_per_s: float

    def floor_ms(self, num_bytes: float, num_flops: float = 0.0) -> float:
        """The least time for so much: the greater of the two."""
        return 1e3 * max(num_bytes / self.bytes_per_s, num_flops / self.flops_per_s)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Give back what torch holds and nobody uses."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def median_ms(work: Work, device: torch.device) -> float:
    """Of several runs, after a first; launches are waited for."""
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
    """The time of the device alone: launches are recorded as a graph, where there are any."""
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
    """How long the block has taken, the device's work included; ask behind it."""
    synchronize(device)
    began = time.perf_counter()
    ended: list[float] = []
    yield lambda: ended[0] - began
    synchronize(device)
    ended.append(time.perf_counter())
