"""The metrics of a gateway, for Prometheus and through OTLP with the names of OpenTelemetry's
conventions for generative AI."""

from collections.abc import Sequence
from dataclasses import dataclass

from opentelemetry import metrics as otel
from prometheus_client import Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric

from shared.messages import JobClass
from shared.telemetry.metrics import (
    CONTENT_TYPE,
    FIRST_TOKEN_S,
    PROCESS,
    REQUEST_S,
    TAKEOVER_REASONS,
    TOKEN_S,
    Catalog,
)
from shared.telemetry.requests import TenantLabels

_MAX_TENANTS = 1000
_LIMITS = (
    "max_requests",
    "max_bytes_in_flight",
    "max_queue_wait_s",
    "queue_length",
    "max_connections",
    "max_connections_per_address",
    "requests_per_minute",
    "tokens_per_minute",
    "max_concurrent",
    "max_detached",
    "tenant_requests_per_minute",
    "tenant_tokens_per_minute",
    "tenant_max_concurrent",
    "tenant_monthly_budget",
)
"""The limits for which refused requests are counted from 0 on."""
_LAG_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_COMPLETIONS = "cmpl"
"""The beginning of the ids of requests without a conversation."""


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """The metrics of a model and class. They are kept because a label lookup takes microseconds,
    and each request needs ten metrics."""

    num_running: Gauge
    num_waiting: Gauge
    first_token_s: Histogram
    token_s: Histogram
    request_s: Histogram


@dataclass(frozen=True, slots=True)
class TokenCounters:
    """The tokens of a model, class and tenant."""

    prompt: Counter
    cached: Counter
    completion: Counter


class Metrics:
    """The metrics of a gateway."""

    content_type = CONTENT_TYPE

    def __init__(self, num_tenants: int = 0) -> None:
        self.catalog = catalog = Catalog()
        self.gen_ai = GenAiMetrics()
        self.tenant_usage = TenantUsage()
        self._tenants = TenantLabels(num_tenants, catalog.forget_tenant)
        self._by_class: dict[tuple[str, JobClass], RequestMetrics] = {}
        by_class = ("model", "class")
        by_tenant = (*by_class, "tenant")
        self._num_running = catalog.gauge(
            "warren_gateway_requests_running",
            "Requests of this gateway that a worker is answering.",
            *by_class,
        )
        self._num_waiting = catalog.gauge(
            "warren_gateway_requests_waiting",
            "Requests of this gateway that no worker has started yet.",
            *by_class,
        )
        self.promoted_lines = catalog.counter(
            "warren_gateway_batch_lines_promoted_total",
            "Requests of batches that were published with interactive priority, because their "
            "batch would not have ended within its window.",
            "model",
        )
        self._first_token_s = catalog.histogram(
            "warren_gateway_time_to_first_token_seconds",
            "From the arrival of a request to its first token.",
            FIRST_TOKEN_S,
            *by_class,
        )
        self._token_s = catalog.histogram(
            "warren_gateway_inter_token_latency_seconds",
            "Time between two tokens of a choice.",
            TOKEN_S,
            *by_class,
        )
        self._request_s = catalog.histogram(
            "warren_gateway_request_duration_seconds",
            "From the arrival of an accepted request to the end of its answer.",
            REQUEST_S,
            *by_class,
        )
        self.loop_lag_s = catalog.histogram(
            "warren_gateway_loop_lag_seconds",
            "How late the event loop calls a timer, measured four times a second. All requests of "
            "the gateway wait meanwhile.",
            _LAG_S,
        )
        self.requests = catalog.counter(
            "warren_gateway_requests_total",
            "Accepted requests that ended, by outcome: completed, client_gone, or the code of the "
            "error.",
            *by_tenant,
            "outcome",
        )
        self._prompt_tokens = catalog.counter(
            "warren_gateway_prompt_tokens_total", "Prompt tokens.", *by_tenant
        )
        self._cached_tokens = catalog.counter(
            "warren_gateway_cached_tokens_total",
            "Prompt tokens that were found in a worker's prefix cache.",
            *by_tenant,
        )
        self._completion_tokens = catalog.counter(
            "warren_gateway_completion_tokens_total",
            "Tokens passed on to clients.",
            *by_tenant,
        )
        self.finished = catalog.counter(
            "warren_gateway_choices_finished_total",
            "Choices that ended, by finish reason.",
            "model",
            "reason",
        )
        self.takeovers = catalog.counter(
            "warren_gateway_takeovers_total",
            "Streams that moved to another worker, by the reason: worker_lost, worker_silent, "
            "connection_lost, handed_over, outrun (by a hedge) or requested_again.",
            "model",
            "reason",
        )
        self.refused = catalog.counter(
            "warren_gateway_requests_refused_total",
            "Requests answered with an error before they were accepted, by the reason: the setting "
            "of the limit that was reached, the field of the API key that has it, or the code of "
            "the error.",
            "reason",
            begin=_LIMITS,
        )
        self._errors = catalog.counter(
            "warren_gateway_errors_total",
            "Errors answered, before and in streams, by code.",
            "code",
        )
        self.resumed = catalog.counter(
            "warren_gateway_streams_resumed_total", "Streams that a client resumed."
        )
        self.webhooks = catalog.counter(
            "warren_gateway_webhooks_total",
            "Tries to deliver a webhook, by outcome: delivered, retried (a further try follows) or "
            "dead (it was the last one, or there was no room for one in time).",
            "outcome",
            begin=("delivered", "retried", "dead"),
        )
        self.responses_stored = catalog.counter(
            "warren_gateway_responses_stored_total",
            "Responses that were to be stored, by outcome: stored, refused (there was no database "
            "when the request came, and it was answered all the same), failed (the database took "
            "the response too late or not at all) or gone (the log disappeared before its end, "
            "because the client left or the broker lost it).",
            "outcome",
        )
        self.sign_ins = catalog.counter(
            "warren_gateway_sign_ins_total",
            "Sign-ins with the OpenID provider, by outcome: completed, denied (by the provider, or "
            "no role is given), expired (the browser has begun none lately), failed (a proof does "
            "not hold), unavailable (the provider does not answer) or busy (too many at once).",
            "outcome",
            begin=("completed", "denied", "expired", "failed", "unavailable", "busy"),
        )
        self.keys_file_broken = catalog.gauge(
            "warren_gateway_keys_file_broken",
            "1 while the file of API keys has a fault and older keys are in force.",
        )
        self.store_up = catalog.gauge(
            "warren_gateway_store_up",
            "1 unless the last use of the store has failed: the database, or the storage of files. "
            "A database in use is asked every few seconds, and must work for 15 seconds. For the "
            "disks of SQLite and of local files, 0 while they are nearly full.",
            "store",
        )

    def of_class(self, model: str, job_class: JobClass) -> RequestMetrics:
        """The metrics of a model and class."""
        labels = (model, job_class)
        known = self._by_class.get(labels)
        if known is None:
            known = self._by_class[labels] = RequestMetrics(
                num_running=self._num_running.labels(*labels),
                num_waiting=self._num_waiting.labels(*labels),
                first_token_s=self._first_token_s.labels(*labels),
                token_s=self._token_s.labels(*labels),
                request_s=self._request_s.labels(*labels),
            )
            for reason in TAKEOVER_REASONS:
                self.takeovers.labels(model, reason)
        return known

    def tokens_and_first_tokens(self) -> tuple[Sequence[Metric], Sequence[Metric]]:
        """The counters of completion tokens, and the histograms of the time to first token."""
        return list(self._completion_tokens.collect()), list(self._first_token_s.collect())

    def tenant_label(self, tenant: str) -> str:
        """The label of a request's tenant, which this counts. Call it once for each request."""
        return self._tenants.label(tenant)

    def tokens_of(self, model: str, job_class: JobClass, tenant_label: str) -> TokenCounters:
        labels = (model, job_class, tenant_label)
        self.requests.labels(*labels, "completed")
        return TokenCounters(
            prompt=self._prompt_tokens.labels(*labels),
            cached=self._cached_tokens.labels(*labels),
            completion=self._completion_tokens.labels(*labels),
        )

    def count_error(self, code: str) -> None:
        self._errors.labels(code).inc()

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        catalogs = (PROCESS, self.catalog)
        return b"".join(generate_latest(catalog.registry) for catalog in catalogs)


@dataclass(slots=True)
class UsageOfTenant:
    """The use of a tenant since the gateway's start. Tokens count once a request has ended."""

    num_requests: int = 0
    """All requests, including requests in flight."""
    num_in_flight: int = 0
    num_interactive: int = 0
    """The requests in flight of the class ``interactive``."""
    num_failed: int = 0
    num_cancelled: int = 0
    """Requests that were cancelled, also by the end of their batch. They did not fail."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache."""
    num_generated_tokens: int = 0


class TenantUsage:
    """The usage of the latest tenants; beyond a thousand, the earliest tenant is forgotten."""

    def __init__(self) -> None:
        self.by_tenant: dict[str, UsageOfTenant] = {}

    def num_interactive(self, tenant: str) -> int:
        """The interactive requests of a tenant that are in flight."""
        usage = self.by_tenant.get(tenant)
        return 0 if usage is None else usage.num_interactive

    def begin(self, tenant: str, *, is_interactive: bool) -> UsageOfTenant:
        """Count a request that is in flight from now on. The caller updates the tenant's usage at
        its end."""
        usage = self.by_tenant.get(tenant)
        if usage is None:
            if len(self.by_tenant) >= _MAX_TENANTS:
                del self.by_tenant[next(iter(self.by_tenant))]
            usage = self.by_tenant[tenant] = UsageOfTenant()
        usage.num_requests += 1
        usage.num_in_flight += 1
        usage.num_interactive += is_interactive
        return usage

    def forget(self, tenant: str) -> None:
        """Forget a tenant that is erased."""
        self.by_tenant.pop(tenant, None)


class GenAiMetrics:
    """OpenTelemetry's metrics of a generative AI server. Without ``WARREN_OTLP_ENDPOINT``
    recording does nothing."""

    def __init__(self) -> None:
        meter = otel.get_meter("warren")
        self._first_token_s = meter.create_histogram(
            "gen_ai.server.time_to_first_token",
            "s",
            "Time to generate the first token of a successful response.",
            explicit_bucket_boundaries_advisory=[
                0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10
            ],
        )  # fmt: skip
        self._token_s = meter.create_histogram(
            "gen_ai.server.time_per_output_token",
            "s",
            "Time per output token after the first one, of successful responses.",
            explicit_bucket_boundaries_advisory=[
                0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5
            ],
        )  # fmt: skip
        self._request_s = meter.create_histogram(
            "gen_ai.server.request.duration",
            "s",
            "Duration of a request.",
            explicit_bucket_boundaries_advisory=[0.01 * 2**k for k in range(14)],
        )
        self._tokens = meter.create_histogram(
            "gen_ai.client.token.usage",
            "{token}",
            "Number of input and output tokens of a request.",
            explicit_bucket_boundaries_advisory=[4.0**k for k in range(14)],
        )

    def record(
        self,
        request_id: str,
        model: str,
        *,
        duration_s: float,
        first_token_s: float | None,
        num_prompt_tokens: int,
        num_tokens: int,
        error_code: str | None,
    ) -> None:
        """Record a request that ended."""
        is_completion = request_id.partition("-")[0] == _COMPLETIONS
        attributes = {
            "gen_ai.operation.name": "text_completion" if is_completion else "chat",
            "gen_ai.provider.name": "warren",
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
        }
        failed = {} if error_code is None else {"error.type": error_code}
        self._request_s.record(duration_s, attributes | failed)
        for kind, count in (("input", num_prompt_tokens), ("output", num_tokens)):
            self._tokens.record(count, attributes | {"gen_ai.token.type": kind})
        if first_token_s is not None and error_code is None:
            self._first_token_s.record(first_token_s, attributes)
            if num_tokens > 1:
                per_token_s = (duration_s - first_token_s) / (num_tokens - 1)
                self._token_s.record(per_token_s, attributes)
