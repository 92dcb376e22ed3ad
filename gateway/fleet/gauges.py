"""Metrics of the whole deployment as a gateway sees it: queues and workers; and of its own limits.

All gateways export the same values of queues and workers: use ``max``, not ``sum``, over gateways.
"""

from collections.abc import Callable, Sequence

from gateway.fleet.live_workers import LiveWorkers
from gateway.fleet.queue_watch import QueueReading, QueueWatch
from shared import topology
from shared.bus.base import Bus
from shared.messages import Announcement, JobClass
from shared.settings import GatewaySettings
from shared.telemetry.metrics import Catalog, Samples

_BY_MODEL = ("model",)
_BY_CLASS = ("model", "class")
DUE_WITHIN_S = (10, 60, 600)
"""Seconds within which tokens are due."""
_LIMITS = (
    "max_requests",
    "max_connections",
    "max_bytes_in_flight",
    "max_queue_wait_s",
)


def export_fleet(
    catalog: Catalog,
    settings: GatewaySettings,
    bus: Bus,
    queues: QueueWatch,
    workers: LiveWorkers,
    num_requests: Callable[[], int],
    slack_s: Callable[[str, JobClass], float],
    due_tokens: Callable[[str, JobClass, Sequence[float]], Sequence[int]],
) -> None:
    """Add these metrics to ``catalog``. They are read at each scrape. ``slack_s`` and
    ``due_tokens`` are methods of `gateway.log.registry.Relays`."""

    def of_queues(read: Callable[[QueueReading], float]) -> Callable[[], Samples]:
        return lambda: [(key, read(reading)) for key, reading in queues.readings.items()]

    catalog.at_scrape(
        "gauge",
        "warren_queue_jobs_waiting",
        "Jobs in the queue at the broker, of all publishers, and those that workers have set "
        "aside. The class quick contains tokenizations and embeddings, suspect quarantined jobs.",
        _BY_CLASS,
        of_queues(lambda reading: reading.num_waiting),
    )
    catalog.at_scrape(
        "gauge",
        "warren_queue_oldest_age_seconds",
        "Age of the oldest waiting job, estimated from above; 0 if none waits.",
        _BY_CLASS,
        of_queues(lambda reading: reading.oldest_age_s),
    )
    catalog.at_scrape(
        "gauge",
        "warren_queue_tokens_waiting",
        "Tokens of the waiting jobs, prompt and answer together, estimated from recent jobs.",
        _BY_CLASS,
        lambda: [(key, queues.num_tokens_waiting(*key)) for key in queues.readings],
    )
    catalog.at_scrape(
        "gauge",
        "warren_queue_work_seconds",
        "Worker-seconds that the waiting jobs will take, estimated from recent jobs: so many "
        "workers finish them within a second.",
        _BY_CLASS,
        lambda: [(key, queues.work_s_waiting(*key)) for key in queues.readings],
    )
    catalog.at_scrape(
        "gauge",
        "warren_gateway_deadline_slack_seconds",
        "Seconds to the nearest deadline of this gateway's requests that no worker has started; "
        "the request timeout if there are none. Use min over gateways.",
        _BY_CLASS,
        lambda: [
            ((model, job_class), slack_s(model, job_class))
            for model in sorted(workers.known_models)
            for job_class in topology.JOB_CLASSES
        ],
    )
    catalog.at_scrape(
        "gauge",
        "warren_gateway_due_tokens",
        "Tokens, prompts and answers together and estimated, of this gateway's requests that no "
        "worker has started and whose deadlines are within so many seconds. Use sum over gateways.",
        (*_BY_CLASS, "within_s"),
        lambda: [
            ((model, job_class, str(within_s)), num_tokens)
            for model in sorted(workers.known_models)
            for job_class in topology.JOB_CLASSES
            for within_s, num_tokens in zip(
                DUE_WITHIN_S, due_tokens(model, job_class, DUE_WITHIN_S), strict=True
            )
        ],
    )
    catalog.at_scrape(
        "gauge",
        "warren_queue_consumers",
        "Workers that consume the queue.",
        _BY_CLASS,
        of_queues(lambda reading: reading.num_consumers),
    )
    catalog.at_scrape(
        "gauge",
        "warren_queue_dead_letters",
        "Dead letters at the broker.",
        (),
        lambda: [((), queues.num_dead)],
    )

    def of_fleet(count: Callable[[Announcement, JobClass], int]) -> Callable[[], Samples]:
        return lambda: [
            (
                (model, job_class),
                sum(count(worker, job_class) for worker in workers.of_model(model)),
            )
            for model in sorted(workers.known_models)
            for job_class in topology.JOB_CLASSES
        ]

    catalog.at_scrape(
        "gauge",
        "warren_fleet_workers",
        "Live workers: those that have sent a heartbeat recently.",
        _BY_MODEL,
        lambda: [((m,), len(workers.of_model(m))) for m in sorted(workers.known_models)],
    )
    catalog.at_scrape(
        "gauge",
        "warren_fleet_sequences_running",
        "Sequences in the batches of all live workers.",
        _BY_CLASS,
        of_fleet(_num_running),
    )
    catalog.at_scrape(
        "gauge",
        "warren_fleet_sequences_free",
        "Further sequences that the batches of all live workers have slots for.",
        _BY_CLASS,
        of_fleet(_num_free),
    )
    catalog.at_scrape(
        "gauge",
        "warren_gateway_broker_connected",
        "1 while the gateway is connected to the broker, otherwise 0.",
        (),
        lambda: [((), bus.is_connected)],
    )
    catalog.at_scrape(
        "gauge",
        "warren_gateway_broker_blocked",
        "1 while the broker accepts no messages, because it is short of memory or disk space, "
        "otherwise 0.",
        (),
        lambda: [((), bus.is_blocked)],
    )
    catalog.at_scrape(
        "gauge",
        "warren_fleet_clock_skew_seconds",
        "The largest difference between a live worker's clock and this gateway's.",
        _BY_MODEL,
        lambda: [((m,), workers.clock_skew_s(m)) for m in sorted(workers.known_models)],
    )
    catalog.at_scrape(
        "gauge",
        "warren_gateway_requests_in_flight",
        "Requests in flight whose bodies have arrived. The limit max_requests counts the others, "
        "too.",
        (),
        lambda: [((), num_requests())],
    )
    catalog.at_scrape(
        "gauge",
        "warren_gateway_limit",
        "The gateway's limits by name, such as max_requests.",
        ("limit",),
        lambda: [((name,), getattr(settings, name)) for name in _LIMITS],
    )


def _num_running(worker: Announcement, job_class: JobClass) -> int:
    num_batch = worker.num_running_batch
    return num_batch if job_class == "batch" else worker.num_running - num_batch


def _num_free(worker: Announcement, job_class: JobClass) -> int:
    reserved = worker.batch_reserve if job_class == "batch" else 0
    return max(0, worker.max_num_seqs - worker.num_running - reserved)
