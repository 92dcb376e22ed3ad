"""The worker as a reader of a log that has no other reader, to find where to continue."""

import asyncio
import logging

from shared.bus.base import Bus, Message
from shared.errors import (
    AccessRefused,
    BusUnavailable,
    QueueBusy,
    QueueNotFound,
    UndecodableMessage,
    Unroutable,
)
from shared.messages import ReplyEvent, Started, decode_event
from shared.telemetry import floods

logger = logging.getLogger(__name__)

_TIMEOUT_S = 30.0
"""Seconds. A worker that does not find the end must not lock out readers; 100,000 events take 5
s."""


async def read_log(bus: Bus, queue: str, ticket: str) -> list[ReplyEvent | None] | None:
    """Read the log from its start to the `Started` with ``ticket``.

    Returns None if it cannot be read now: another reader holds it, the broker is unreachable, the
    `Started` does not come in time, or the broker's user lacks the permission.

    Events that cannot be decoded are None. Nothing is acknowledged, so the next reader finds the
    whole log. Raises `Unroutable` if the log no longer exists.
    """
    try:
        state = await bus.inspect(queue)
        if state is None:
            raise Unroutable(f"the log {queue} is gone")
        if state.num_consumers:
            return None
        async with asyncio.timeout(_TIMEOUT_S):
            return await _read(bus, queue, ticket)
    except (QueueBusy, BusUnavailable, TimeoutError):
        return None
    except QueueNotFound:
        raise Unroutable(f"the log {queue} is gone") from None
    except AccessRefused as error:
        logger.warning("log not readable, waiting for its reader", extra={"reason": error.message})
        return None


async def _read(bus: Bus, queue: str, ticket: str) -> list[ReplyEvent | None]:
    events: list[ReplyEvent | None] = []
    async with bus.consume(queue, is_exclusive=True) as consumer:
        async for delivery in consumer:
            event = _decode(delivery.message)
            events.append(event)
            if isinstance(event, Started) and event.ticket == ticket:
                break
    return events


def _decode(message: Message) -> ReplyEvent | None:
    try:
        return decode_event(message.body, message.content_type)
    except UndecodableMessage as error:
        facts = {"request_id": message.correlation_id, "reason": error.message}
        user = message.user_id or ""
        floods.warn(logger, "undecodable event in a log", "message dropped", facts, user)
        return None
