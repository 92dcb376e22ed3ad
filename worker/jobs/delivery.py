"""A delivery of a job, from the moment a worker takes it until it is settled."""

import asyncio
from collections.abc import Awaitable

from shared import incidents
from shared.bus.base import Consumer, Delivery, Message

_GIVE_BACK_PAUSE_S = 0.5
"""A job that fails at once each time needs 10 s to use up the returns that its queue allows: too
slow to disturb other jobs."""


class JobDelivery:
    """A `Delivery` that can be settled without raising anything.

    When the broker cannot be told what becomes of it, its consumer stops. Another consumer takes
    over then, and the broker gets back what is not settled once the jobs in hand have ended and the
    stopped one closes.
    """

    def __init__(self, delivery: Delivery, consumer: Consumer) -> None:
        self._delivery = delivery
        self._consumer = consumer

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

    async def give_back(self, error: Exception) -> None:
        """Report an error that the job's own handling could not deal with, and return the job to
        its queue after a pause. The limits on returns end a job that fails each time."""
        facts = {"request_id": self.message.correlation_id, "num_returns": self.num_returns}
        incidents.report("job", "job given back to its queue", error, **facts)
        await self._settle(self._return_later())

    async def _return_later(self) -> None:
        await asyncio.sleep(_GIVE_BACK_PAUSE_S)
        await self._delivery.reject(requeue=True)

    async def _settle(self, settling: Awaitable[None]) -> None:
        try:
            await settling
        except Exception as error:  # noqa: BLE001 (whatever it is, it is reported)
            facts = {"request_id": self.message.correlation_id}
            incidents.report("job", "delivery not settled", error, **facts)
            await incidents.keep_running(self._consumer.stop, "job consumer not stopped")
