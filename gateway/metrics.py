"""The gateway's metrics, named after vLLM's so that dashboards can be reused."""

from dataclasses import dataclass, fields

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from shared import incidents

_FIRST_TOKEN_S = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
)  # fmt: skip
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 20)
_REQUEST_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 300, 600)


@dataclass(frozen=True, slots=True)
class ModelMetrics:
    """The metrics of one model. They are kept because a label lookup takes microseconds, and each
    request needs ten of them."""

    num_running: Gauge
    num_waiting: Gauge
    first_token_s: Histogram
    token_s: Histogram
    request_s: Histogram
    prompt_tokens: Counter
    generation_tokens: Counter


class Metrics:
    """The metrics of one gateway, in their own registry."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(incidents.REGISTRY)
        self._by_model: dict[str, ModelMetrics] = {}
        self.num_running = self._gauge(
            "num_requests_running", "Requests that a worker is answering."
        )
        self.num_waiting = self._gauge(
            "num_requests_waiting", "Requests that are waiting for a worker."
        )
        self.first_token_s = self._histogram(
            "time_to_first_token_seconds", "From a request to its first token.", _FIRST_TOKEN_S
        )
        self.token_s = self._histogram(
            "inter_token_latency_seconds", "Time between two tokens of a choice.", _TOKEN_S
        )
        self.request_s = self._histogram(
            "e2e_request_latency_seconds", "From a request to the end of its answer.", _REQUEST_S
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens relayed.")
        self.success = self._counter(
            "request_success", "Finished choices, by reason.", "finished_reason"
        )
        self.resumed = Counter(
            "warren:streams_resumed", "Streams that a client resumed.", registry=self._registry
        )
        self._errors = Counter(
            "warren:request_errors", "Errors answered.", ["code"], registry=self._registry
        )

        self.keys_file_broken = Gauge(
            "warren:keys_file_broken",
            "1 while the file of API keys has a fault and older keys are in force.",
            registry=self._registry,
        )

    def of_model(self, model: str) -> ModelMetrics:
        known = self._by_model.get(model)
        if known is None:
            names = (field.name for field in fields(ModelMetrics))
            labelled = {name: getattr(self, name).labels(model) for name in names}
            known = self._by_model[model] = ModelMetrics(**labelled)
        return known

    def count_error(self, code: str) -> None:
        self._errors.labels(code).inc()

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"warren:{name}", text, ["model_name"], registry=self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"warren:{name}", text, ["model_name", *labels], registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            f"warren:{name}", text, ["model_name"], registry=self._registry, buckets=buckets
        )
