"""The worker as a reader: a log that nobody else reads tells it where to go on."""

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

logger = logging.getLogger(__name__)

_TIMEOUT_S = 30.0
"""A worker that finds no end must not lock readers out: 100,000 events take 5 s."""


async def read_log(bus: Bus, queue: str, ticket: str) -> list[ReplyEvent | None] | None:
    """The log from its start to the `Started` that bears ``ticket``, with None in place of what
    cannot be decoded; None where it is being read.

    Nothing is acknowledged: the next reader finds the whole log. Raises `Unroutable` when the log
    is gone.
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
        logger.warning("log not readable: it waits for a reader", extra={"reason": error.message})
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
        logger.warning("event of a log is not decodable", extra=facts)
        return None
