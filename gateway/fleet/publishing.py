"""The publishing of jobs to the queues of workers."""

from contextlib import suppress

from gateway.fleet import affinity
from gateway.fleet.live_workers import LiveWorkers
from shared import topology
from shared.bus.base import Bus, Message
from shared.errors import (
    InvalidRequest,
    MessageTooLarge,
    ModelNotFound,
    Overloaded,
    PublishRefused,
    Unroutable,
)
from shared.messages import Announcement, GenerationJob, JobClass, QuickJob, encode
from shared.telemetry.metrics import Catalog


class JobPublisher:
    """Publishes generations: to the queue of the worker that may have their prefix in its cache, or
    to the one that all workers share."""

    def __init__(
        self, bus: Bus, workers: LiveWorkers, catalog: Catalog, *, has_affinity: bool
    ) -> None:
        """Adds a counter to ``catalog``."""
        self._bus = bus
        self._workers = workers
        self._has_affinity = has_affinity
        self._published = catalog.counter(
            "warren_gateway_jobs_published_total",
            "Generations published, by route: near (to the worker that may have their prefix in "
            "its cache) or shared (to the queue that all workers of the model share).",
            "model",
            "route",
        )

    async def publish(
        self, job: GenerationJob, reply_key: str, lane: JobClass = "interactive"
    ) -> None:
        """As `publish_job`, and raises the same errors."""
        near, shared = (self._published.labels(job.model, route) for route in ("near", "shared"))
        favourite = self._favourite(job) if lane == "interactive" else None
        if favourite is not None and await self._publish_near(job, reply_key, favourite.worker):
            near.inc()
        else:
            await publish_job(self._bus, job, reply_key, lane)
            shared.inc()

    def _favourite(self, job: GenerationJob) -> Announcement | None:
        """The worker to prefer. None for a job that is published again, because it may have been
        lost with that worker."""
        if not self._has_affinity or job.publication:
            return None
        candidates = self._workers.candidates(job.model)
        if len(candidates) < 2:
            return None
        root = affinity.root_of(job)
        return None if root is None else affinity.favourite(root, candidates)

    async def _publish_near(self, job: GenerationJob, reply_key: str, address: str) -> bool:
        """Publish to the queue of one worker; False if it is gone or full. Raises `BusError`."""
        message = _message(job, reply_key)
        with suppress(Unroutable, PublishRefused, MessageTooLarge):
            await self._bus.publish(topology.near_binding(job.model, address), message)
            return True
        return False


async def publish_job(
    bus: Bus, job: GenerationJob | QuickJob, reply_key: str, lane: JobClass = "interactive"
) -> None:
    """Publish ``job`` to a queue of its model, if it is a generation that of its class ``lane``; it
    is answered under ``reply_key``.

    Raises `ModelNotFound`, `Overloaded`, `InvalidRequest` and `BusError`.
    """
    of_job: topology.Lane = lane if isinstance(job, GenerationJob) else "quick"
    message = _message(job, reply_key)
    try:
        await bus.publish(topology.jobs_binding(job.model, of_job), message)
    except Unroutable:
        raise ModelNotFound(f"The model '{job.model}' does not exist.", param="model") from None
    except PublishRefused:
        raise Overloaded(
            "Too many requests are waiting for this model.", limit="queue_length"
        ) from None
    except MessageTooLarge:
        raise InvalidRequest("The request is too large.") from None


def _message(job: GenerationJob | QuickJob, reply_key: str) -> Message:
    return Message(encode(job), correlation_id=job.request_id, reply_to=reply_key)
