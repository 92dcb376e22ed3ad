"""What a worker exports: its process, its jobs (`worker.jobs.metrics`) and its engine."""

from collections.abc import Callable, Mapping

from prometheus_client import generate_latest

from shared.messages import JobClass
from shared.telemetry.metrics import PROCESS, Catalog, Samples, StepHistogram
from shared.topology import JOB_CLASSES
from worker.engine.interface import DRAFT_SOURCES, DraftSource, EngineLoad
from worker.engine.step_times import BOUNDS_S, StepTimes
from worker.jobs.metrics import JobMetrics

_BY_MODEL = ("model",)
_BY_CLASS = ("model", "class")
_BY_SOURCE = ("model", "source")


class WorkerMetrics:
    """All metrics of a worker. The engine's metrics are read at each scrape."""

    def __init__(
        self,
        jobs: JobMetrics,
        load: Callable[[], EngineLoad],
        step_times: StepTimes,
        *,
        stalled_s: Callable[[], float],
        limits: Mapping[str, float],
        batch_reserve: int = 0,
        num_jobs_waiting: Callable[[JobClass], int] = lambda _: 0,
        facts: Mapping[str, object] | None = None,
    ) -> None:
        """``limits`` include ``max_num_seqs``; ``facts`` describe the model as it is loaded."""
        self.catalog = catalog = Catalog()
        self._jobs = jobs
        self._load = load
        self._max_num_seqs = int(limits["max_num_seqs"])
        self._batch_reserve = batch_reserve
        by_model = (jobs.model,)
        found = (facts or {}).get("sequence_state_bytes")
        state_bytes = found if isinstance(found, int) else 0
        info = {name: str((facts or {}).get(name, "")) for name in ("device", "dtype", "numerics")}

        def of_engine(read: Callable[[EngineLoad], float]) -> Callable[[], Samples]:
            return lambda: [(by_model, read(load()))]

        catalog.at_scrape(
            "gauge",
            "warren_worker_info",
            "Always 1; the labels describe how the model runs.",
            ("model", *info),
            lambda: [((jobs.model, *info.values()), 1)],
        )
        catalog.at_scrape(
            "gauge",
            "warren_worker_limit",
            "The worker's limits, by the name of the setting; kv_cache_bytes is the size of the KV "
            "cache, which holds kv_cache_tokens tokens of short sequences, or kv_cache_sequences "
            "sequences of maximum length.",
            ("model", "limit"),
            lambda: [((jobs.model, name), value) for name, value in limits.items()],
        )
        catalog.at_scrape(
            "gauge",
            "warren_worker_sequences_running",
            "Sequences in the batch.",
            _BY_CLASS,
            lambda: self._by_class(_num_running),
            vllm="num_requests_running",
        )
        catalog.at_scrape(
            "gauge",
            "warren_worker_sequences_waiting",
            "Sequences of jobs that this worker has taken and that wait for room in the batch.",
            _BY_CLASS,
            lambda: self._by_class(_num_waiting),
            vllm="num_requests_waiting",
        )
        catalog.at_scrape(
            "gauge",
            "warren_worker_jobs_waiting",
            "Jobs that this worker has taken and not begun.",
            _BY_CLASS,
            lambda: [((jobs.model, name), num_jobs_waiting(name)) for name in JOB_CLASSES],
        )
        catalog.at_scrape(
            "gauge",
            "warren_worker_sequences_free",
            "Further sequences that the batch has slots for.",
            _BY_CLASS,
            self._num_free,
        )
        catalog.at_scrape(
            "gauge",
            "warren_worker_kv_cache_usage_ratio",
            "Used share of the KV cache's blocks, 0 to 1. Cached blocks that can be evicted are "
            "free.",
            _BY_MODEL,
            of_engine(lambda now: 1 - now.num_free_blocks / now.num_blocks),
            vllm="kv_cache_usage_perc",
        )
        catalog.at_scrape(
            "gauge",
            "warren_worker_kv_cache_blocks",
            "Blocks of the KV cache, by content: tokens or states (keys and values, or recurrent "
            "states, of running sequences), cached_tokens or snapshots (the same in the prefix "
            "cache alone: they can be evicted), empty.",
            (*_BY_MODEL, "content"),
            self._blocks,
        )
        catalog.at_scrape(
            "gauge",
            "warren_worker_sequence_state_bytes",
            "Bytes of the KV cache that the recurrent states of a running sequence take: the state "
            "that a step reads, and the state that it writes. 0 if the model keeps no states.",
            _BY_MODEL,
            lambda: [(by_model, state_bytes)],
        )
        catalog.at_scrape(
            "gauge",
            "warren_worker_stalled_seconds",
            "Seconds for which the engine has had work without completing a step; 0 if idle.",
            _BY_MODEL,
            lambda: [(by_model, stalled_s())],
        )
        catalog.at_scrape(
            "counter",
            "warren_worker_preemptions_total",
            "Sequences that were preempted, and are computed again.",
            _BY_MODEL,
            of_engine(lambda now: now.num_preemptions),
            vllm="num_preemptions",
        )
        catalog.at_scrape(
            "counter",
            "warren_worker_prefix_cache_queries_total",
            "Prompt tokens that were looked up in the prefix cache.",
            _BY_MODEL,
            of_engine(lambda now: now.num_begun_tokens),
            vllm="prefix_cache_queries",
        )
        catalog.at_scrape(
            "counter",
            "warren_worker_prefix_cache_hits_total",
            "Prompt tokens that were found in the prefix cache.",
            _BY_MODEL,
            of_engine(lambda now: now.num_cached_tokens),
            vllm="prefix_cache_hits",
        )
        catalog.at_scrape(
            "counter",
            "warren_worker_draft_tokens_total",
            "Tokens that were drafted, by the source of the draft: text (the prompt and the answer "
            "so far), grammar, predictor (the model's own layer that predicts tokens).",
            _BY_SOURCE,
            lambda: self._by_source(load().num_drafted),
            vllm="spec_decode_num_draft_tokens",
        )
        catalog.at_scrape(
            "counter",
            "warren_worker_accepted_draft_tokens_total",
            "Tokens that were generated as they were drafted, by the source of the draft.",
            _BY_SOURCE,
            lambda: self._by_source(load().num_accepted),
            vllm="spec_decode_num_accepted_tokens",
        )
        catalog.at_scrape(
            "counter",
            "warren_worker_engine_failures_total",
            "Failures of the engine's server, by kind: failed (a stream broke, or an answer made "
            "no sense), unreachable, busy (429 or 503), refused (a request), refused_constraint (a "
            "request that was made again without its constraint), constraint (a token was not "
            "allowed, and was drawn again), away (the server stopped answering), unfit (it "
            "answers, and serves something else), ended (a child process), hung (a child process "
            "was replaced).",
            (*_BY_MODEL, "kind"),
            lambda: [((jobs.model, kind), count) for kind, count in load().num_failures.items()],
        )
        steps = catalog.describe(
            "warren_worker_step_duration_seconds",
            "histogram",
            "Duration of the engine's steps.",
            _BY_MODEL,
        )
        catalog.registry.register(
            StepHistogram(
                steps,
                by_model,
                BOUNDS_S,
                lambda: ([*step_times.counts], step_times.total_s),
            )
        )

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        catalogs = (PROCESS, self._jobs.catalog, self.catalog)
        return b"".join(generate_latest(catalog.registry) for catalog in catalogs)

    def _by_class(self, count: Callable[[EngineLoad, JobClass], int]) -> Samples:
        load = self._load()
        return [((self._jobs.model, name), count(load, name)) for name in JOB_CLASSES]

    def _by_source(self, counts: Mapping[DraftSource, int]) -> Samples:
        return [((self._jobs.model, source), counts.get(source, 0)) for source in DRAFT_SOURCES]

    def _blocks(self) -> Samples:
        counts = self._load().block_counts
        by_content = {} if counts is None else counts._asdict()
        return [((self._jobs.model, name), count) for name, count in by_content.items()]

    def _num_free(self) -> Samples:
        num_free = self._max_num_seqs - self._load().num_running
        for name in JOB_CLASSES:
            reserved = self._batch_reserve if name == "batch" else 0
            yield (self._jobs.model, name), max(0, num_free - reserved)


def _num_running(load: EngineLoad, job_class: JobClass) -> int:
    is_batch = job_class == "batch"
    return load.num_running_batch if is_batch else load.num_running - load.num_running_batch


def _num_waiting(load: EngineLoad, job_class: JobClass) -> int:
    is_batch = job_class == "batch"
    return load.num_waiting_batch if is_batch else load.num_waiting - load.num_waiting_batch
