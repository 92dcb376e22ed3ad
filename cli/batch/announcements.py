"""The announcements of a model's workers, which state how it writes tool calls and reasoning."""

import asyncio
import logging
import uuid
from contextlib import suppress

from shared import topology
from shared.bus.base import Bus, Consumer
from shared.bus.temporary import temporary
from shared.errors import AccessRefused, UndecodableMessage
from shared.messages import Announcement, decode_announcement
from shared.topology import own_name

logger = logging.getLogger(__name__)

_PATIENCE_S = 10.0
"""Several announcement intervals."""


async def announcement(bus: Bus, model: str) -> Announcement | None:
    """Wait for the next announcement of a worker that serves ``model``.

    Returns None at once if nothing consumes the model's jobs, and None if the broker's user may
    not receive announcements: a batch works without them. Raises `BusUnavailable`.
    """
    if not await _has_worker(bus, model):
        return None
    queue = topology.publisher_queue(own_name(bus.user, uuid.uuid4().hex))
    try:
        async with temporary(bus, queue):
            with suppress(TimeoutError):
                async with asyncio.timeout(_PATIENCE_S), bus.consume(queue.name) as consumer:
                    return await _next(consumer, model)
    except AccessRefused as error:
        logger.warning("worker announcements unavailable", extra={"reason": error.message})
        return None
    logger.warning(
        "worker announcements unavailable", extra={"reason": "none received", "model": model}
    )
    return None


async def _has_worker(bus: Bus, model: str) -> bool:
    states = [await bus.inspect(topology.jobs_queue(model, lane).name) for lane in topology.LANES]
    return any(state is not None and state.num_consumers for state in states)


async def _next(consumer: Consumer, model: str) -> Announcement | None:
    async for delivery in consumer:
        await delivery.ack()
        with suppress(UndecodableMessage):
            said = decode_announcement(delivery.message.body)
            if said.model == model and not said.is_leaving:
                return said
    return None
