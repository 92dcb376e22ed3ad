"""The measurements of this gateway in the last hour, for charts without Prometheus."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from prometheus_client.metrics_core import Metric

from gateway.fleet.queue_watch import QueueWatch

INTERVAL_S = 15.0
_NUM_SAMPLES = 240
"""An hour: the memory that samples take has a bound."""


class Sample(NamedTuple):
    """An interval, which ended at the Unix time ``at``."""

    at: float
    tokens_per_s: float
    """Tokens that this gateway passed on to clients."""
    first_token_s: float | None
    """The 95th percentile of the time to the first token; None if there was no first token."""
    num_first_tokens: int
    num_running: int
    """Requests of this gateway in flight at the end."""
    num_waiting: int
    """Jobs that waited for workers at the end, of all gateways and AMQP publishers."""


class Reading(NamedTuple):
    """The counters that intervals are computed from."""

    at: float
    num_tokens: float
    first_tokens: Sequence[tuple[float, float]]
    """Upper bounds in seconds, and how many first tokens took at most as long."""


class RecentSamples:
    """Takes a sample every `INTERVAL_S` and keeps the samples of the last hour. ``read`` returns
    the counters of tokens and the histograms of the time to first token."""

    def __init__(
        self,
        read: Callable[[], tuple[Sequence[Metric], Sequence[Metric]]],
        queues: QueueWatch,
        num_requests: Callable[[], int],
    ) -> None:
        self._read_metrics = read
        self._queues = queues
        self._num_requests = num_requests
        self._before = self._read()
        self.latest: deque[Sample] = deque(maxlen=_NUM_SAMPLES)
        """The oldest sample first."""

    async def run(self) -> None:
        """Take samples, until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            self.take()

    def take(self) -> None:
        """Close the current interval."""
        before, self._before = self._before, self._read()
        first_tokens = _difference(before.first_tokens, self._before.first_tokens)
        self.latest.append(
            Sample(
                at=self._before.at,
                tokens_per_s=(self._before.num_tokens - before.num_tokens)
                / max(self._before.at - before.at, 1e-3),
                first_token_s=quantile(first_tokens, 0.95),
                num_first_tokens=int(first_tokens[-1][1]) if first_tokens else 0,
                num_running=self._num_requests(),
                num_waiting=sum(one.num_waiting for one in self._queues.readings.values()),
            )
        )

    def _read(self) -> Reading:
        tokens, first_tokens = self._read_metrics()
        return Reading(time.time(), _total(tokens), _buckets(first_tokens))


def quantile(buckets: Sequence[tuple[float, float]], share: float) -> float | None:
    """A quantile of cumulative ``buckets``, interpolated as Prometheus does: the upper bound of the
    last bucket but one if the quantile lies in the last bucket, which has no bound. None without
    any values."""
    if not buckets or buckets[-1][1] <= 0:
        return None
    rank = share * buckets[-1][1]
    for (low, num_before), (high, num) in pairwise([(0.0, 0.0), *buckets]):
        if num >= rank:
            is_open = high == float("inf")
            return low if is_open else low + (high - low) * (rank - num_before) / (num - num_before)
    return None


def _total(metrics: Sequence[Metric]) -> float:
    return sum(
        sample.value
        for metric in metrics
        for sample in metric.samples
        if sample.name.endswith("_total")
    )


def _buckets(metrics: Sequence[Metric]) -> list[tuple[float, float]]:
    """The buckets of all models and classes together."""
    sums: dict[float, float] = {}
    for metric in metrics:
        for sample in metric.samples:
            if sample.name.endswith("_bucket"):
                bound = float(sample.labels["le"])
                sums[bound] = sums.get(bound, 0.0) + sample.value
    return sorted(sums.items())


def _difference(
    before: Sequence[tuple[float, float]], after: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    old = dict(before)
    return [(bound, num - old.get(bound, 0.0)) for bound, num in after]
