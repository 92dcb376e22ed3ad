"""Plays traffic on a fleet, and lets an autoscaler change its size."""

from typing import Protocol

from bench.simulation.autoscaler import Autoscaler, Demand
from bench.simulation.books import Books
from bench.simulation.traffic import Arrivals, Traffic

TICK_S = 1.0
_SAMPLE_S = 60.0


class Fleet(Protocol):
    """The workers of one model, with their queues and gateways."""

    @property
    def books(self) -> Books: ...

    @property
    def size(self) -> int:
        """The number of workers that there should be."""
        ...

    @property
    def num_ready(self) -> int:
        """The number of workers that take jobs."""
        ...

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or runs."""
        ...

    @property
    def demand(self) -> Demand: ...

    def advance(self, until: float, arrivals: Arrivals) -> None:
        """Simulate up to ``until``, with requests that arrive meanwhile."""
        ...

    def resize(self, size: int) -> None:
        """Start workers, or let some drain and stop."""
        ...


def play(
    fleet: Fleet,
    traffic: Traffic,
    duration_s: float,
    autoscaler: Autoscaler | None = None,
    *,
    tick_s: float = TICK_S,
) -> Books:
    """Run a fleet for so many seconds of virtual time; returns its books. ``tick_s``: how far it
    advances at a time."""
    sizes = fleet.books.sizes
    for tick in range(1, round(duration_s / tick_s) + 1):
        until = tick * tick_s
        fleet.advance(until, traffic.until(until))
        if autoscaler is not None:
            size = autoscaler.act(until, lambda: fleet.demand.total, fleet.size)
            if size != fleet.size:
                fleet.resize(size)
        if until % _SAMPLE_S == 0 or not sizes.workers or sizes.workers[-1] != fleet.size:
            sizes.at.append(until)
            sizes.workers.append(fleet.size)
            sizes.ready.append(fleet.num_ready)
            sizes.demand.append(fleet.demand.total)
    return fleet.books
