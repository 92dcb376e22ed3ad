"""Publishes a request's events in order, in the encoding of its job."""

import asyncio

from shared import topology
from shared.bus.base import Binding, Bus, Delivery, Message
from shared.errors import BusUnavailable, PublishRefused, PublishUnconfirmed
from shared.messages import ReplyEvent, encode

_RETRY_PAUSE_S = 0.2
_MAX_REFUSED = 10
"""A broker refuses single messages while it recovers. A queue of limited length, which a publisher
may have declared for its replies, refuses until it is read."""


class ReplyPublisher:
    """Publishes the events of one request to its reply queue."""

    def __init__(self, bus: Bus, delivery: Delivery, request_id: str) -> None:
        self._bus = bus
        self._binding: Binding = topology.reply_binding(delivery.message.reply_to)
        self._content_type = delivery.message.content_type
        self._correlation_id = delivery.message.correlation_id or request_id

    @property
    def queue(self) -> str:
        """The name of the reply queue, if the gateway named it after its routing key."""
        return self._binding.routing_key

    async def publish(self, event: ReplyEvent) -> None:
        """Return once the broker has confirmed the event; without a confirmation it is sent again.

        Raises `Unroutable` if the log does not exist. After any error but a `BusError` the event
        may have arrived.
        """
        body = encode(event, self._content_type)
        num_refused = 0
        while True:
            # A new message for each try, because returned messages are matched by message id.
            message = Message(
                body, content_type=self._content_type, correlation_id=self._correlation_id
            )
            try:
                return await self._bus.publish(self._binding, message)
            except PublishRefused:
                num_refused += 1
                if num_refused > _MAX_REFUSED:
                    raise
            except (BusUnavailable, PublishUnconfirmed):
                pass
            await asyncio.sleep(_RETRY_PAUSE_S)
            await self._bus.wait_connected()
