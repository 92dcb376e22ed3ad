"""Metrics for Prometheus: a catalog that describes what a process exports.

The page ``docs/metrics.md`` and the recording rules with vLLM's names are generated from the
catalogs of gateway and worker.
"""

import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from shared.version import VERSION

# They would double the number of series.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
MetricKind: TypeAlias = Literal["counter", "gauge", "histogram"]
Samples: TypeAlias = Iterable[tuple[Sequence[str], float]]
"""Values, each with the values of its labels."""

FIRST_TOKEN_S = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
)  # fmt: skip
TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 20)
REQUEST_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 300, 600)


@dataclass(frozen=True, slots=True)
class Description:
    """A metric, as the documentation describes it."""

    name: str
    """The name as it is exported; the names of a histogram's series have a further suffix."""
    kind: MetricKind
    meaning: str
    labels: tuple[str, ...]
    vllm: str
    """vLLM's name for it, without ``vllm:``; empty if there is none."""


TAKEOVER_REASONS = (
    "worker_lost",
    "worker_silent",
    "connection_lost",
    "handed_over",
    "outrun",
    "requested_again",
)
"""Why a request got another worker, as both the gateway and the worker count it."""


class Catalog:
    """The metrics of a part of a process, with their descriptions."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.descriptions: list[Description] = []
        self._by_tenant: list[Counter] = []
        self._read_at_scrape: list[tuple[Description, Callable[[], Samples]]] = []
        self.registry.register(_AtScrape(self._read_at_scrape))

    def counter(
        self, name: str, meaning: str, *labels: str, begin: Iterable[str] = (), vllm: str = ""
    ) -> Counter:
        """A counter that code increments; ``name`` ends with ``_total``. ``begin``: the values of
        its only label that begin with 0, because a counter that begins with its first event shows
        no increase."""
        self.describe(name, "counter", meaning, labels, vllm)
        counter = Counter(name, meaning, labels, registry=self.registry)
        if "tenant" in labels:
            self._by_tenant.append(counter)
        for value in begin:
            counter.labels(value)
        return counter

    def gauge(self, name: str, meaning: str, *labels: str, vllm: str = "") -> Gauge:
        self.describe(name, "gauge", meaning, labels, vllm)
        return Gauge(name, meaning, labels, registry=self.registry)

    def histogram(
        self, name: str, meaning: str, buckets: Sequence[float], *labels: str, vllm: str = ""
    ) -> Histogram:
        self.describe(name, "histogram", meaning, labels, vllm)
        return Histogram(name, meaning, labels, registry=self.registry, buckets=buckets)

    def at_scrape(
        self,
        kind: Literal["counter", "gauge"],
        name: str,
        meaning: str,
        labels: Sequence[str],
        read: Callable[[], Samples],
        *,
        vllm: str = "",
    ) -> None:
        """A metric whose values are read at each scrape, so that the metric keeps no copy."""
        description = self.describe(name, kind, meaning, labels, vllm)
        self._read_at_scrape.append((description, read))

    def forget_tenant(self, tenant: str) -> None:
        """Remove the series of a tenant."""
        for counter in self._by_tenant:
            counter.remove_by_labels({"tenant": tenant})

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return prometheus_client.generate_latest(self.registry)

    def describe(
        self, name: str, kind: MetricKind, meaning: str, labels: Sequence[str], vllm: str = ""
    ) -> Description:
        """Describe a metric that a collector of its own exports."""
        description = Description(name, kind, meaning, tuple(labels), vllm)
        self.descriptions.append(description)
        return description


class _AtScrape(Collector):
    def __init__(self, metrics: list[tuple[Description, Callable[[], Samples]]]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        for description, read in self._metrics:
            is_counter = description.kind == "counter"
            family = (CounterMetricFamily if is_counter else GaugeMetricFamily)(
                description.name, description.meaning, labels=description.labels
            )
            for labels, value in read():
                family.add_metric(labels, value)
            yield family


class StepHistogram(Collector):
    """A histogram that another thread counts without a lock: see `worker.engine.step_times`."""

    def __init__(
        self,
        description: Description,
        labels: Sequence[str],
        bounds: Sequence[float],
        counts: Callable[[], tuple[Sequence[int], float]],
    ) -> None:
        """``counts`` returns the number of values in each bucket, and their sum. The last bucket
        has no bound."""
        self._description = description
        self._labels = labels
        self._bounds = [*map(str, bounds), "+Inf"]
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        counts, total = self._counts()
        buckets, cumulative = [], 0
        for bound, count in zip(self._bounds, counts, strict=True):
            cumulative += count
            buckets.append((bound, float(cumulative)))
        family = HistogramMetricFamily(
            self._description.name, self._description.meaning, labels=self._description.labels
        )
        family.add_metric(self._labels, buckets, total)
        yield family


PROCESS = Catalog()
"""What every process exports. Both sides of `warren serve` share it."""
ProcessCollector(registry=PROCESS.registry)


PROCESS.at_scrape(
    "gauge",
    "warren_build_info",
    "Always 1; the labels are the versions of Warren and Python.",
    ("version", "python"),
    lambda: [((VERSION, platform.python_version()), 1)],
)
reconnects = PROCESS.counter(
    "warren_broker_reconnects_total",
    "Connections to the broker that were opened again. A process has several connections.",
)
