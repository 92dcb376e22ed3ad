"""The samples of the last hour."""

import math

import pytest

from gateway.fleet.live_workers import Backlog, LiveWorkers
from gateway.fleet.queue_watch import QueueReading, QueueWatch
from gateway.fleet.samples import RecentSamples, quantile
from gateway.metrics import Metrics
from shared.bus.memory import MemoryBus


def new_samples(bus: MemoryBus) -> tuple[RecentSamples, Metrics, QueueWatch]:
    metrics = Metrics()
    workers = LiveWorkers(bus, Backlog(bus, 60), catalog=metrics.catalog)
    queues = QueueWatch(bus, workers)
    return RecentSamples(metrics.tokens_and_first_tokens, queues, lambda: 3), metrics, queues


async def test_a_sample_has_what_happened_since_the_one_before(bus: MemoryBus) -> None:
    samples, metrics, queues = new_samples(bus)
    queues.readings = {("m", "interactive"): QueueReading(5, 1, 0.0)}
    metrics.tokens_of("m", "interactive", "").completion.inc(90)
    metrics.of_class("m", "interactive").first_token_s.observe(0.3)
    samples.take()
    metrics.tokens_of("n", "batch", "").completion.inc(10)
    samples.take()

    first, second = samples.latest

    assert (first.num_first_tokens, first.num_running, first.num_waiting) == (1, 3, 5)
    assert first.first_token_s == pytest.approx(0.4875)  # of the bucket from 0.25 to 0.5
    assert (second.num_first_tokens, second.first_token_s) == (0, None)
    assert first.tokens_per_s > 0
    assert second.tokens_per_s > 0


async def test_an_hour_is_kept(bus: MemoryBus) -> None:
    samples, *_ = new_samples(bus)

    for _ in range(500):
        samples.take()

    assert len(samples.latest) == 240


@pytest.mark.parametrize(
    ("buckets", "expected"),
    [
        ([], None),
        ([(1.0, 0.0), (math.inf, 0.0)], None),
        ([(1.0, 10.0), (math.inf, 10.0)], 0.95),
        ([(1.0, 0.0), (2.0, 20.0), (math.inf, 20.0)], 1.95),
        ([(1.0, 5.0), (math.inf, 10.0)], 1.0),  # beyond the last bound
    ],
)
def test_quantiles_are_interpolated(
    buckets: list[tuple[float, float]], expected: float | None
) -> None:
    assert quantile(buckets, 0.95) == expected
