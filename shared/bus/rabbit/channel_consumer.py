"""A consumer on its own channel, and its deliveries."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, cast

from aiormq import Channel
from aiormq.abc import DeliveredMessage
from pamqp.commands import Basic

from shared import incidents
from shared.bus.inbox import Inbox
from shared.bus.rabbit.channels import close_channel
from shared.bus.rabbit.encoding import num_returns, to_message
from shared.bus.rabbit.failures import is_asked_for, translated
from shared.bus.rabbit.frames import Frames
from shared.bus.rabbit.resources import Resources
from shared.bus.rabbit.shielded_calls import Calls
from shared.errors import BusError, BusUnavailable, QueueNotFound


class RabbitDelivery:
    """A `Delivery`. It does not keep the frames, which take 2 KiB: every stream holds its last
    delivery."""

    __slots__ = ("_consumer", "_is_settled", "_tag", "message", "num_returns")

    def __init__(self, delivered: DeliveredMessage, consumer: "RabbitConsumer") -> None:
        self.message = to_message(delivered)
        self.num_returns = num_returns(delivered)
        self._tag = delivered.delivery_tag or 0
        self._consumer = consumer
        self._is_settled = False

    async def ack(self) -> None:
        if self._settle():
            await self._consumer.ack(self._tag)

    async def reject(self, *, requeue: bool = False) -> None:
        if self._settle():
            await self._consumer.reject(self._tag, requeue=requeue)

    def _settle(self) -> bool:
        """Mark as settled; False if it was settled before, because the broker closes a channel that
        settles a delivery twice."""
        is_first, self._is_settled = not self._is_settled, True
        return is_first


class RabbitConsumer:
    """A `Consumer`. Closing its channel returns all unsettled deliveries in order."""

    def __init__(self, channel: Channel, queue: str, resources: Resources, calls: Calls) -> None:
        self._channel = channel
        self._queue = queue
        self._resources = resources
        self._calls = calls
        self._tag = ""
        self._inbox: Inbox[RabbitDelivery] = Inbox()

    def __aiter__(self) -> "RabbitConsumer":
        return self

    async def __anext__(self) -> RabbitDelivery:
        try:
            return await self._inbox.get()
        except QueueNotFound:
            # Brokers also cancel consumers of queues that still exist: after a timeout or a change
            # of leader.
            inspection = self._resources.inspect(self._queue)
            if await self._calls.run(inspection, f"inspect {self._queue}") is None:
                raise
            raise BusUnavailable(f"the broker stopped the consumer of {self._queue}") from None

    @property
    def is_open(self) -> bool:
        return not self._inbox.is_ended

    async def start(self, *, prefetch: int, is_exclusive: bool) -> None:
        """Start consuming. The caller must be neither cancelled nor timed out before this
        returns."""
        self._channel.on_consumer_cancel_callbacks.add(self._on_cancel)
        self._channel.closing.add_done_callback(self._on_close)
        self._channel.frames = cast("Any", Frames(self._channel, self._on_delivered))
        with translated(f"consume {self._queue}", self._channel):
            if prefetch:
                await self._channel.basic_qos(prefetch_count=prefetch)
            answer = await self._channel.basic_consume(
                self._queue, _on_message, exclusive=is_exclusive
            )
        self._tag = answer.consumer_tag or ""

    async def stop(self) -> None:
        with suppress(BusUnavailable):
            await self._calls.run(self._stop(), f"stop consuming {self._queue}")
        self._inbox.end()

    async def close(self) -> None:
        with suppress(BusUnavailable):
            await self._calls.run(self._close(), f"close the consumer of {self._queue}")

    async def ack(self, tag: int) -> None:
        await self._settle(self._channel.basic_ack(tag, wait=False), "acknowledge")

    async def reject(self, tag: int, *, requeue: bool) -> None:
        await self._settle(self._channel.basic_reject(tag, requeue=requeue, wait=False), "reject")

    async def _settle(self, settling: Coroutine[Any, Any, None], doing: str) -> None:
        """Settle a delivery; no effect if the channel is closed, because the message is redelivered
        then."""
        with suppress(BusUnavailable):
            await self._calls.run(self._settled(settling), doing)

    async def _settled(self, settling: Coroutine[Any, Any, None]) -> None:
        with suppress(BusError), translated("settle a delivery", self._channel):
            await settling

    async def _stop(self) -> None:
        with suppress(BusError), translated(f"stop consuming {self._queue}", self._channel):
            await self._channel.basic_cancel(self._tag)
        self._inbox.end()

    async def _close(self) -> None:
        self._inbox.fail(BusUnavailable("the consumer is closed"))
        with suppress(BusError), translated(f"close the consumer of {self._queue}", self._channel):
            await close_channel(self._channel)

    def _on_delivered(self, delivered: DeliveredMessage) -> None:
        self._inbox.put(RabbitDelivery(delivered, self))

    def _on_cancel(self, _: Basic.Cancel) -> None:
        self._inbox.end(QueueNotFound(f"queue {self._queue} was deleted"))

    def _on_close(self, closing: "asyncio.Future[None]") -> None:
        error = None if closing.cancelled() else closing.exception()
        # Without a consumer tag, the error is the result of `start`.
        is_lost = self._tag and self.is_open and not self._channel.connection.is_closed
        if is_lost and not is_asked_for(error):
            incidents.report("channel", "consumer cut off", error, queue=self._queue)
        self._inbox.fail(BusUnavailable(f"consuming {self._queue} was cut off: {error or ''}"))


async def _on_message(_: DeliveredMessage) -> None:
    """The callback that aiormq requires; `Frames` takes the deliveries first, so it is never
    called."""
