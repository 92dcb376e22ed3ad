"""The durations of steps, as the buckets of a histogram."""

from bisect import bisect_left
from typing import NamedTuple

BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 20)


class StepFacts(NamedTuple):
    """A completed step."""

    duration_s: float
    num_sequences: int
    num_tokens: int


class StepTimes:
    """Counts steps. One thread adds; others may read, and miss a step that is being added."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        """The number of steps up to each bound, and above the last bound."""
        self.total_s = 0.0

    def add(self, duration_s: float) -> None:
        self.counts[bisect_left(BOUNDS_S, duration_s)] += 1
        self.total_s += duration_s
