"""Publishes jobs to the queues of models."""

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
from shared.messages import GenerationJob, QuickJob, encode, seconds_left


async def publish_job(bus: Bus, job: GenerationJob | QuickJob, reply_key: str) -> None:
    """Publish ``job`` to the queue of its model; it is answered under ``reply_key``.

    Raises `ModelNotFound`, `Overloaded`, `InvalidRequest` and `BusError`.
    """
    lane: topology.Lane = "interactive" if isinstance(job, GenerationJob) else "quick"
    message = Message(
        encode(job),
        correlation_id=job.request_id,
        reply_to=reply_key,
        expires_s=seconds_left(job),
    )
    try:
        await bus.publish(topology.jobs_binding(job.model, lane), message)
    except Unroutable:
        raise ModelNotFound(f"The model '{job.model}' does not exist.", param="model") from None
    except PublishRefused:
        raise Overloaded("Too many requests are waiting for this model.") from None
    except MessageTooLarge:
        raise InvalidRequest("The request is too large.") from None
