"""The worker's metrics, named after vLLM's so that dashboards can be reused."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shared import incidents
from worker.decode.bridge import Generations


def new_registry(generations: Generations) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(_EngineCollector(generations))
    registry.register(incidents.REGISTRY)
    return registry


class _EngineCollector(Collector):
    """Reads the engine's counters at each scrape, so that they are kept in one place only."""

    def __init__(self, generations: Generations) -> None:
        self._generations = generations

    def collect(self) -> Iterator[Metric]:
        load = self._generations.load
        yield GaugeMetricFamily(
            "warren:num_requests_running", "Sequences in the batch.", load.num_running
        )
        yield GaugeMetricFamily(
            "warren:num_requests_waiting", "Sequences waiting for the batch.", load.num_waiting
        )
        yield GaugeMetricFamily(
            "warren:kv_cache_usage_perc",
            "Share of the KV cache's blocks in use, 0 to 1.",
            1 - load.num_free_blocks / load.num_blocks,
        )
        yield CounterMetricFamily(
            "warren:num_preemptions", "Preemptions since the start.", load.num_preemptions
        )
        yield CounterMetricFamily(
            "warren:prefix_cache_queries",
            "Tokens of prompts looked up in the prefix cache.",
            load.num_begun_tokens,
        )
        yield CounterMetricFamily(
            "warren:prefix_cache_hits",
            "Tokens of prompts found in the prefix cache.",
            load.num_cached_tokens,
        )
        yield CounterMetricFamily(
            "warren:prompt_tokens", "Tokens of prompts taken.", self._generations.num_prompt_tokens
        )
        yield CounterMetricFamily(
            "warren:generation_tokens",
            "Tokens generated.",
            self._generations.num_generated_tokens,
        )
