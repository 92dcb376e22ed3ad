"""Jobs on their way to the workers of a model."""

import time

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
from shared.messages import GenerationJob, encode


async def publish_job(bus: Bus, job: GenerationJob) -> None:
    """Put ``job`` into the queue of its model, to be answered in its own reply queue.

    Raises `ModelNotFound`, `Overloaded`, `InvalidRequest` and `BusError`.
    """
    message = Message(
        encode(job),
        correlation_id=job.request_id,
        reply_to=topology.reply_key(job.request_id),
        expires_s=job.deadline and max(0.001, job.deadline - time.time()),
    )
    try:
        await bus.publish(topology.jobs_binding(job.model, "interactive"), message)
    except Unroutable:
        raise ModelNotFound(f"The model '{job.model}' does not exist.", param="model") from None
    except PublishRefused:
        raise Overloaded("Too many requests wait for this model.") from None
    except MessageTooLarge:
        raise InvalidRequest("The request is too large.") from None
