"""A delivery of a job: publishes the job's events and settles the delivery."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from shared import incidents, topology
from shared.bus.base import Binding, Bus, Delivery, Message
from shared.bus.subscribe import Subscription
from shared.errors import BusUnavailable, PublishRefused, PublishUnconfirmed
from shared.messages import ReplyEvent, encode

_GIVE_BACK_PAUSE_S = 0.5
"""Seconds. A job that is given back each time exhausts its returns within 10 s, without noticeable
effect on other jobs."""
_RETRY_PAUSE_S = 0.2
_MAX_REFUSED = 10
"""A broker refuses single messages while it recovers. A queue of limited length, which a publisher
may have declared for its replies, refuses until it is read."""


class JobDelivery:
    """A `Delivery` that can be settled without raising.

    After an unexpected error it is settled again. In case that has no effect either, its
    subscription stops and another one replaces it. The broker then gets unsettled deliveries back
    when the jobs of the stopped one have ended and it closes.
    """

    def __init__(self, delivery: Delivery, subscription: Subscription) -> None:
        self._delivery = delivery
        self._subscription = subscription

    @property
    def message(self) -> Message:
        return self._delivery.message

    @property
    def num_returns(self) -> int:
        return self._delivery.num_returns

    async def ack(self) -> None:
        await self._settle(self._delivery.ack)

    async def reject(self, *, requeue: bool = False) -> None:
        await self._settle(partial(self._delivery.reject, requeue=requeue))

    async def give_back(self) -> None:
        """Requeue the job after a pause."""
        await self._settle(self._return_later)

    async def _return_later(self) -> None:
        await asyncio.sleep(_GIVE_BACK_PAUSE_S)
        await self._delivery.reject(requeue=True)

    async def _settle(self, settle: Callable[[], Awaitable[None]]) -> None:
        facts = {"request_id": self.message.correlation_id}
        try:
            await settle()
        except Exception as error:  # noqa: BLE001 (any error is reported)
            incidents.report("job", "delivery settled again", error, **facts)
            with incidents.survived("job", "delivery not settled", **facts):
                await settle()
            await incidents.keep_running(self._subscription.stop, "job consumer not stopped")


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
