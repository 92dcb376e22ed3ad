"""Measures how much of the machine other processes use during a measurement."""

import time
from collections.abc import Callable
from contextlib import suppress
from operator import itemgetter
from typing import TypeVar

import psutil

from bench.servers import trees
from cli.terminal import notices

_Result = TypeVar("_Result")

_MAX_CORES = 0.3
"""Cores that other processes may use."""
_MAX_ATTEMPTS = 3
_PATIENCE_S = 30.0
_LOOK_S = 1.0


class OtherLoad:
    """Measures the cores that processes outside the benchmark use, from its creation on."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._busy_s = _busy_s()

    def cores(self) -> float:
        """The mean since then. An orphaned process of ours that has ended counts as other load."""
        return max(0.0, _busy_s() - self._busy_s) / (time.perf_counter() - self._start)


def undisturbed(measure: Callable[[int], _Result]) -> tuple[_Result, float]:
    """Measure without disturbance; returns the result of ``measure`` and the cores that others
    used.

    Waits until other processes are idle, and repeats the measurement if they were active during it.
    ``measure`` receives the number of the attempt. If all attempts were disturbed, the least
    disturbed attempt counts.
    """
    attempts: list[tuple[_Result, float]] = []
    for attempt in range(_MAX_ATTEMPTS):
        _wait_for_others()
        others = OtherLoad()
        attempts.append((measure(attempt), others.cores()))
        if attempts[-1][1] <= _MAX_CORES:
            break
        notices.print(f"  others kept {attempts[-1][1]:.1f} cores busy")
    return min(attempts, key=itemgetter(1))


def _wait_for_others() -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        others = OtherLoad()
        time.sleep(_LOOK_S)
        if others.cores() <= _MAX_CORES:
            return


def _busy_s() -> float:
    """CPU seconds of the machine that neither the benchmark nor its children used."""
    times = psutil.cpu_times()
    return (
        float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice) - own_cpu_s()
    )


def own_cpu_s() -> float:
    """CPU seconds of this process, its living descendants, and its children that have ended."""
    total = 0.0
    for process in trees([psutil.Process()]):
        with suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])
    return total
