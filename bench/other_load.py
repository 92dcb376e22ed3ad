"""How much of the machine others use while something is measured."""

import time
from contextlib import suppress

import psutil

from bench.servers import trees


class OtherLoad:
    """Counts from its making on the cores that processes outside the bench keep busy."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._busy_s = _busy_s()

    def cores(self) -> float:
        """The mean since then. What ended meanwhile and was nobody's child counts as another's."""
        return max(0.0, _busy_s() - self._busy_s) / (time.perf_counter() - self._start)


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
