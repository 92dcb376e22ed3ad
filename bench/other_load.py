"""How much of the machine others use while something is measured."""

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
"""That others may keep busy."""
_MAX_ATTEMPTS = 3
_PATIENCE_S = 30.0
_LOOK_S = 1.0


class OtherLoad:
    """Counts from its making on the cores that processes outside the bench keep busy."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._busy_s = _busy_s()

    def cores(self) -> float:
        """The mean since then. What ended meanwhile and was nobody's child counts as another's."""
        return max(0.0, _busy_s() - self._busy_s) / (time.perf_counter() - self._start)


def undisturbed(measure: Callable[[int], _Result]) -> tuple[_Result, float]:
    """What ``measure`` returns, and how many cores others kept busy meanwhile.

    Waits for others to leave the machine, and measures again where they came back; ``measure`` is
    given the number of the attempt. Where they never left, the least disturbed attempt counts.
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
    """CPU seconds of the machine that the bench and what it started did not use."""
    times = psutil.cpu_times()
    return (
        float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice) - own_cpu_s()
    )


def own_cpu_s() -> float:
    """CPU seconds of this process, of all that it started and lives, and of all that it saw end."""
    total = 0.0
    for process in trees([psutil.Process()]):
        with suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])
    return total
