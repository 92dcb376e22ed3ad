"""One consumer on a channel of its own, and its deliveries."""

import asyncio
from contextlib import suppress
from typing import Any, cast

from aiormq import Channel
from aiormq.abc import DeliveredMessage
from pamqp.commands import Basic

from shared.bus.inbox import Inbox
from shared.bus.rabbit.codec import num_returns, to_message
from shared.bus.rabbit.failures import translated
from shared.bus.rabbit.frames import Frames
from shared.bus.rabbit.resources import Resources
from shared.errors import BusError, BusUnavailable, QueueNotFound


class RabbitDelivery:
    """A `Delivery`. It keeps no frames, which take 2 KiB: each stream holds its last delivery."""

    __slots__ = ("_channel", "_is_settled", "_tag", "_timeout_s", "message", "num_returns")

    def __init__(self, delivered: DeliveredMessage, channel: Channel, timeout_s: float) -> None:
        self.message = to_message(delivered)
        self.num_returns = num_returns(delivered)
        self._tag = delivered.delivery_tag or 0
        self._channel = channel
        self._timeout_s = timeout_s
        self._is_settled = False

    async def ack(self) -> None:
        if self._settle():
            with suppress(BusUnavailable), translated("acknowledge"):
                async with asyncio.timeout(self._timeout_s):
                    await self._channel.basic_ack(self._tag, wait=False)

    async def reject(self, *, requeue: bool = False) -> None:
        if self._settle():
            with suppress(BusUnavailable), translated("reject"):
                async with asyncio.timeout(self._timeout_s):
                    await self._channel.basic_reject(self._tag, requeue=requeue, wait=False)

    def _settle(self) -> bool:
        """False the second time: the broker closes a channel that settles twice."""
        is_first, self._is_settled = not self._is_settled, True
        return is_first


class RabbitConsumer:
    """A `Consumer`. Closing its channel gives everything back in order."""

    def __init__(
        self, channel: Channel, queue: str, resources: Resources, timeout_s: float
    ) -> None:
        self._channel = channel
        self._queue = queue
        self._resources = resources
        self._timeout_s = timeout_s
        self._tag = ""
        self._inbox: Inbox[RabbitDelivery] = Inbox()

    def __aiter__(self) -> "RabbitConsumer":
        return self

    async def __anext__(self) -> RabbitDelivery:
        try:
            return await self._inbox.get()
        except QueueNotFound:
            # Brokers also cancel consumers of queues that live on: a timeout, a new leader.
            if await self._resources.inspect(self._queue) is None:
                raise
            raise BusUnavailable(f"the broker stopped the consumer of {self._queue}") from None

    @property
    def is_open(self) -> bool:
        return not self._inbox.is_ended

    async def start(self, *, prefetch: int, is_exclusive: bool) -> None:
        self._channel.on_consumer_cancel_callbacks.add(self._on_cancel)
        self._channel.closing.add_done_callback(self._on_close)
        self._channel.frames = cast("Any", Frames(self._channel, self._on_delivered))
        with translated(f"consume {self._queue}"):
            if prefetch:
                await self._channel.basic_qos(prefetch_count=prefetch, timeout=self._timeout_s)
            answer = await self._channel.basic_consume(
                self._queue, _on_message, exclusive=is_exclusive, timeout=self._timeout_s
            )
        self._tag = answer.consumer_tag or ""

    async def stop(self) -> None:
        with suppress(BusUnavailable), translated(f"stop consuming {self._queue}"):
            await self._channel.basic_cancel(self._tag, timeout=self._timeout_s)
        self._inbox.end()

    async def close(self) -> None:
        self._inbox.fail(BusUnavailable("the consumer is closed"))
        with suppress(BusError), translated(f"close the consumer of {self._queue}"):
            await self._channel.close(timeout=self._timeout_s)

    def _on_delivered(self, delivered: DeliveredMessage) -> None:
        self._inbox.put(RabbitDelivery(delivered, self._channel, self._timeout_s))

    def _on_cancel(self, _: Basic.Cancel) -> None:
        self._inbox.end(QueueNotFound(f"queue {self._queue} was deleted"))

    def _on_close(self, closing: "asyncio.Future[None]") -> None:
        reason = "" if closing.cancelled() else str(closing.exception() or "")
        self._inbox.fail(BusUnavailable(f"consuming {self._queue} was cut off: {reason}"))


async def _on_message(_: DeliveredMessage) -> None:
    """What aiormq would call, did `Frames` not come first."""
