"""What happened to the requests of each tenant, and how the workers were used."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.simulation.traffic import Floats, Ints, Tenant

_FINENESS = 200.0
"""Times are counted by the logarithm, with so many classes for a factor of e: half a percent."""
_SHORTEST_S = 1e-3
_NUM_CLASSES = 3600
_COMPETES_AFTER_S = 5.0
"""A tenant with a request that has waited for so long has more of them than its share lets in."""


@dataclass
class Sizes:
    """The number of workers over time."""

    at: list[float]
    workers: list[int]
    """As the autoscaler wants it."""
    ready: list[int]
    demand: list[float]
    """Jobs that wait and sequences that run."""

    @property
    def num_turns(self) -> int:
        """How often the number began to fall after it had risen, or to rise after it had fallen."""
        steps = np.sign(np.diff(self.workers))
        steps = steps[steps != 0]
        return int(np.count_nonzero(np.diff(steps)))


class Books:
    """Counts by tenant. Times to first token are kept as a histogram."""

    def __init__(self, tenants: Sequence[Tenant]) -> None:
        count = len(tenants)
        self.tenants = tenants
        self.arrived = np.zeros(count, dtype=np.int64)
        self.answered = np.zeros(count, dtype=np.int64)
        self.refused = np.zeros(count, dtype=np.int64)
        """Answered 429, because the estimated wait was too long."""
        self.late = np.zeros(count, dtype=np.int64)
        """Without a complete answer at the deadline."""
        self.handed_over = np.zeros(count, dtype=np.int64)
        """Continued by another worker, because their own one stopped."""
        self.prompt_tokens = np.zeros(count, dtype=np.int64)
        self.cached_tokens = np.zeros(count, dtype=np.int64)
        """The prompt tokens of later turns of conversations, and those that were in a cache."""
        self.later_turns = np.zeros((count, _NUM_CLASSES), dtype=np.int64)
        """Their times to first token, as a histogram."""
        self.contended_cost = np.zeros(count)
        """What each tenant was served while several had more requests than there was room for, in
        the units of `worker.engine.shares` and divided by its weight."""
        self._contended_s = np.zeros(count)
        self.worker_s = 0.0
        """Worker-seconds for which there were pods."""
        self.ready_s = 0.0
        """Worker-seconds for which workers were ready."""
        self.busy_s = 0.0
        """Worker-seconds of steps."""
        self.sequence_s = 0.0
        """Seconds that sequences spent in engines, waiting or running."""
        self.sizes = Sizes([], [], [], [])
        self._first_token = np.zeros((count, _NUM_CLASSES), dtype=np.int64)

    def first_tokens(self, tenant: Ints, seconds: Floats) -> None:
        """Record times to first token."""
        flat = np.bincount(
            tenant * _NUM_CLASSES + _class_of(seconds), minlength=self._first_token.size
        )
        self._first_token += flat.reshape(self._first_token.shape)

    def later_turn(self, tenant: int, seconds: float, num_tokens: int, num_cached: int) -> None:
        """Record the first token of a later turn of a conversation."""
        self.prompt_tokens[tenant] += num_tokens
        self.cached_tokens[tenant] += num_cached
        self.later_turns[tenant, _class_of(np.array([seconds]))] += 1

    def count(self, counts: Ints, tenant: Ints) -> None:
        """Add one for each of these requests to one of the counters."""
        counts += np.bincount(tenant, minlength=len(self.tenants))

    def contend(self, cost: Floats, waited_s: Floats, seconds: float) -> None:
        """Record what each tenant was served during an interval, and how long the oldest of its
        waiting requests has waited."""
        waits = waited_s > _COMPETES_AFTER_S
        if np.count_nonzero(waits) > 1:
            weights = np.array([tenant.weight for tenant in self.tenants])
            self.contended_cost += np.where(waits, cost / weights, 0.0)
            self._contended_s += np.where(waits, seconds, 0.0)

    def ttft_s(self, percent: float, tenant: int | None = None) -> float:
        """A percentile of the time to first token, of one tenant or of all. NaN if there is
        none."""
        all_counts = self._first_token
        return _percentile(
            all_counts.sum(axis=0) if tenant is None else all_counts[tenant], percent
        )

    def later_ttft_s(self, percent: float) -> float:
        """The same for the later turns of conversations."""
        return _percentile(self.later_turns.sum(axis=0), percent)

    @property
    def hit_rate(self) -> float:
        """The part of the prompts of later turns that was in a cache; NaN without any."""
        total = self.prompt_tokens.sum()
        return float(self.cached_tokens.sum() / total) if total else float("nan")

    @property
    def num_failed(self) -> int:
        return int(self.refused.sum() + self.late.sum())

    @property
    def utilisation(self) -> float:
        """The share of their time that ready workers spent on steps."""
        return self.busy_s / self.ready_s if self.ready_s else 0.0

    @property
    def num_sequences(self) -> float:
        """The mean number of sequences of a ready worker."""
        return self.sequence_s / self.ready_s if self.ready_s else 0.0

    @property
    def fairness(self) -> float:
        """Jain's index of what tenants were served for their weight while they competed: 1 is
        equal, 1/n is all for one of n. 1 if they never did.

        Tenants that competed for less than half as long as another one are left out.
        """
        competed = self._contended_s > self._contended_s.max() / 2
        if not competed.any():
            return 1.0
        served = self.contended_cost[competed] / self._contended_s[competed]
        return float(served.sum() ** 2 / (len(served) * (served**2).sum()))


def _class_of(seconds: Floats) -> Ints:
    classes = np.log(np.maximum(seconds, _SHORTEST_S) / _SHORTEST_S) * _FINENESS
    return np.minimum(classes.astype(np.int64), _NUM_CLASSES - 1)


def _percentile(counts: Ints, percent: float) -> float:
    total = counts.sum()
    if not total:
        return float("nan")
    rank = np.searchsorted(np.cumsum(counts), percent / 100 * total)
    return float(_SHORTEST_S * np.exp((rank + 0.5) / _FINENESS))
