"""The metrics of a worker's jobs. The engine's metrics are in `worker.process.metrics`."""

from dataclasses import dataclass

from prometheus_client import Counter, Histogram

from shared.messages import JobClass
from shared.telemetry.metrics import (
    FIRST_TOKEN_S,
    REQUEST_S,
    TAKEOVER_REASONS,
    TOKEN_S,
    Catalog,
)
from shared.telemetry.requests import TenantLabels
from shared.topology import JOB_CLASSES
from worker.jobs.pace import JobPace

_REASONS = (*TAKEOVER_REASONS, "redelivered")
_DEAD = ("undecodable", "worker_lost")
"""Counters that begin with their first event show no increase, so these begin with 0."""
_NUM_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_MEAN_WEIGHT = 0.02
"""The weight of a job in the means: about fifty jobs are remembered."""


@dataclass(frozen=True, slots=True)
class ClassMetrics:
    """The histograms of a class. They are kept because a label lookup takes microseconds."""

    queue_s: Histogram
    first_token_s: Histogram
    prefill_s: Histogram
    decode_s: Histogram
    token_s: Histogram
    job_s: Histogram
    prompt_tokens: Histogram
    generation_tokens: Histogram


class JobMetrics:
    """What a worker counts of its jobs, of all publishers."""

    def __init__(self, model: str, num_tenants: int) -> None:
        self.catalog = catalog = Catalog()
        self.model = model
        self.newest_taken: dict[JobClass, float] = {}
        """When the newest job taken of each class was created, a Unix time."""
        self.mean_job_tokens = 0.0
        self.mean_job_slot_s = 0.0
        """Seconds for which a job occupies a sequence slot of the engine, all choices together."""
        self.pace = JobPace()
        self._tenants = TenantLabels(num_tenants, catalog.forget_tenant)
        self._by_class: dict[str, ClassMetrics] = {}
        by_class = ("model", "class")
        by_tenant = (*by_class, "tenant")
        self.jobs = catalog.counter(
            "warren_worker_jobs_total",
            "Runs of jobs that ended, by outcome: completed, the code of the error, handed_over, "
            "moved (to another queue), superseded (another run has the job), dead_lettered, or "
            "unread (no reader was left).",
            *by_tenant,
            "outcome",
        )
        self.prompt_tokens = catalog.counter(
            "warren_worker_prompt_tokens_total",
            "Prompt tokens of the jobs that began. After a take-over they count again.",
            *by_tenant,
            vllm="prompt_tokens",
        )
        self.generation_tokens = catalog.counter(
            "warren_worker_generation_tokens_total",
            "Tokens generated.",
            *by_tenant,
            vllm="generation_tokens",
        )
        self.interruptions = catalog.counter(
            "warren_worker_interruptions_total",
            "Notices that the machine ends, after which the worker handed its jobs over.",
        )
        self.interruption_looks_failed = catalog.counter(
            "warren_worker_interruption_looks_failed_total",
            "Looks for a notice that the machine ends, which failed: the worker may miss it.",
        )
        self.set_aside = catalog.counter(
            "warren_worker_jobs_set_aside_total",
            "Jobs moved to the model's overflow queue, because their tenant had many waiting.",
            "model",
        )
        self.turned_away = catalog.counter(
            "warren_worker_jobs_turned_away_total",
            "Jobs of AMQP publishers that were answered with an error and not run, because of a "
            "limit or the budget of their tenant.",
            "model",
            "reason",
        )
        self.unchecked = catalog.counter(
            "warren_worker_jobs_unchecked_total",
            "Jobs of AMQP publishers that ran although their tenant has limits, because no gateway "
            "answered.",
            "model",
        )
        self.unchecked.labels(model)
        self.hopeless_jobs = catalog.counter(
            "warren_worker_jobs_hopeless_total",
            "Jobs that failed before they began, because they could not end before their deadlines "
            "any more.",
            *by_class,
        )
        self.near_jobs = catalog.counter(
            "warren_worker_near_jobs_total",
            "Jobs published to this worker's own queue because it may have their prefix in its "
            "cache, by outcome: taken, or moved (to the interactive queue, because no slot was "
            "free).",
            "model",
            "outcome",
        )
        for outcome in ("taken", "moved"):
            self.near_jobs.labels(model, outcome)
        self.takeovers = catalog.counter(
            "warren_worker_takeovers_total",
            "Jobs continued from another run, by the reason: worker_lost, worker_silent, "
            "connection_lost, handed_over, outrun (as a hedge), requested_again, or redelivered if "
            "there is no log that names one.",
            *by_class,
            "reason",
        )
        self.numerics_changes = catalog.counter(
            "warren_worker_numerics_changes_total",
            "Jobs continued here although their tokens were generated with other numerics, so that "
            "the rest of the text may differ from that of an undisturbed run.",
            "model",
        )
        self.numerics_changes.labels(model)
        self.dead_letters = catalog.counter(
            "warren_worker_dead_letters_total",
            "Jobs that this worker dead-lettered, by reason: undecodable, or the code of the "
            "error.",
            "model",
            "reason",
        )
        self.usage_records = catalog.counter(
            "warren_worker_usage_records_total",
            "Usage records of requests that ended here, by result: confirmed by the broker, or "
            "lost, because the broker refused them for too long.",
            "model",
            "result",
        )
        for result in ("confirmed", "lost"):
            self.usage_records.labels(model, result)
        for job_class in JOB_CLASSES:
            self.hopeless_jobs.labels(model, job_class)
            for reason in _REASONS:
                self.takeovers.labels(model, job_class, reason)
        for reason in _DEAD:
            self.dead_letters.labels(model, reason)
        self._histograms = {
            "queue_s": catalog.histogram(
                "warren_worker_queue_time_seconds",
                "From the creation of a job until the first worker began it, by the clocks of "
                "both.",
                REQUEST_S,
                *by_class,
                vllm="request_queue_time_seconds",
            ),
            "first_token_s": catalog.histogram(
                "warren_worker_time_to_first_token_seconds",
                "From the beginning of a job at this worker to its first token.",
                FIRST_TOKEN_S,
                *by_class,
                vllm="time_to_first_token_seconds",
            ),
            "prefill_s": catalog.histogram(
                "warren_worker_prefill_time_seconds",
                "From the submission of a job to the engine to its first token.",
                REQUEST_S,
                *by_class,
                vllm="request_prefill_time_seconds",
            ),
            "decode_s": catalog.histogram(
                "warren_worker_decode_time_seconds",
                "From the first token of a job to its last one.",
                REQUEST_S,
                *by_class,
                vllm="request_decode_time_seconds",
            ),
            "token_s": catalog.histogram(
                "warren_worker_inter_token_latency_seconds",
                "Time between two tokens of a choice.",
                TOKEN_S,
                *by_class,
                vllm="inter_token_latency_seconds",
            ),
            "job_s": catalog.histogram(
                "warren_worker_job_duration_seconds",
                "From the beginning of a job at this worker to its end here.",
                REQUEST_S,
                *by_class,
                vllm="e2e_request_latency_seconds",
            ),
            "prompt_tokens": catalog.histogram(
                "warren_worker_job_prompt_tokens",
                "Prompt tokens of a job that ended.",
                _NUM_TOKENS,
                *by_class,
                vllm="request_prompt_tokens",
            ),
            "generation_tokens": catalog.histogram(
                "warren_worker_job_generation_tokens",
                "Tokens that this worker generated for a job that ended.",
                _NUM_TOKENS,
                *by_class,
                vllm="request_generation_tokens",
            ),
        }

    def of_class(self, job_class: JobClass) -> ClassMetrics:
        known = self._by_class.get(job_class)
        if known is None:
            histograms = {n: h.labels(self.model, job_class) for n, h in self._histograms.items()}
            known = self._by_class[job_class] = ClassMetrics(**histograms)
        return known

    def tenant_label(self, tenant: str) -> str:
        """The label of a job's tenant, which this counts. Call it once for each job."""
        return self._tenants.label(tenant)

    def tokens_of(self, job_class: JobClass, tenant_label: str) -> Counter:
        """The counter of generated tokens."""
        return self.generation_tokens.labels(self.model, job_class, tenant_label)

    def taken(self, job_class: JobClass, created_at: float) -> None:
        """Record that a job was taken from its queue."""
        newest = self.newest_taken.get(job_class, 0.0)
        self.newest_taken[job_class] = max(newest, created_at)

    def learn(self, num_tokens: int, slot_s: float) -> None:
        """Record what a job that ended has used: tokens, prompt and answer together, and slots."""
        weight = _MEAN_WEIGHT if self.mean_job_tokens else 1.0
        self.mean_job_tokens += weight * (num_tokens - self.mean_job_tokens)
        self.mean_job_slot_s += weight * (slot_s - self.mean_job_slot_s)
