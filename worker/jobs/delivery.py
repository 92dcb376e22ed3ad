"""A delivery of a job, from its arrival until it is settled."""

import asyncio
from collections.abc import Awaitable

from shared import incidents
from shared.bus.base import Delivery, Message
from shared.bus.subscribe import Subscription

_GIVE_BACK_PAUSE_S = 0.5
"""Seconds. A job that is given back each time exhausts its returns within 10 s, without noticeable
effect on other jobs."""


class JobDelivery:
    """A `Delivery` that can be settled without raising.

    If the broker cannot be told, its subscription stops and another one replaces it. The broker
    gets unsettled deliveries back when the jobs of the stopped one have ended and it closes.
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
        await self._settle(self._delivery.ack())

    async def reject(self, *, requeue: bool = False) -> None:
        await self._settle(self._delivery.reject(requeue=requeue))

    async def give_back(self) -> None:
        """Requeue the job after a pause."""
        await self._settle(self._return_later())

    async def _return_later(self) -> None:
        await asyncio.sleep(_GIVE_BACK_PAUSE_S)
        await self._delivery.reject(requeue=True)

    async def _settle(self, settling: Awaitable[None]) -> None:
        try:
            await settling
        except Exception as error:  # noqa: BLE001 (any error is reported)
            facts = {"request_id": self.message.correlation_id}
            incidents.report("job", "delivery not settled", error, **facts)
            await incidents.keep_running(self._subscription.stop, "job consumer not stopped")
