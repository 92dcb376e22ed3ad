"""A consumer on its own channel, and its deliveries."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeAlias

from aiormq import Channel
from aiormq.abc import DeliveredMessage
from pamqp.commands import Basic

from shared.bus.base import Inbox, Message, QueueState
from shared.bus.rabbit.channels import close_channel
from shared.bus.rabbit.encoding import (
    is_absence,
    is_answer,
    is_asked_for,
    marshal_ack,
    marshal_cancel,
    marshal_consume,
    marshal_reject,
    to_message,
    translated,
)
from shared.bus.rabbit.frames import MessageFrames, delivery_of
from shared.bus.rabbit.link import Link
from shared.errors import BusError, BusUnavailable, QueueNotFound
from shared.telemetry import incidents

Inspect: TypeAlias = Callable[[str], Awaitable[QueueState | None]]
"""`Bus.inspect`."""


class RabbitDelivery:
    """A `Delivery`."""

    __slots__ = ("_consumer", "_is_settled", "_tag", "message", "num_returns")

    def __init__(
        self, tag: int, message: Message, num_returns: int, consumer: "RabbitConsumer"
    ) -> None:
        self.message = message
        self.num_returns = num_returns
        self._tag = tag
        self._consumer = consumer
        self._is_settled = False

    async def ack(self) -> None:
        if self._settle():
            self._consumer.ack(self._tag)

    async def reject(self, *, requeue: bool = False) -> None:
        if self._settle():
            self._consumer.reject(self._tag, requeue=requeue)

    def _settle(self) -> bool:
        """Mark as settled; False if it was settled before, because the broker closes a channel that
        settles a delivery twice."""
        is_first, self._is_settled = not self._is_settled, True
        return is_first


class RabbitConsumer(MessageFrames):
    """A `Consumer`. Closing its channel returns all unsettled deliveries in order."""

    def __init__(self, channel: Channel, queue: str, inspect: Inspect, link: Link) -> None:
        """``channel`` is a new channel of ``link``."""
        super().__init__()
        self._channel = channel
        self._queue = queue
        self._inspect = inspect
        self._link = link
        self._tag = ""
        self._is_exclusive = False
        self._gather_s = 0.0
        self._fetching: asyncio.TimerHandle | None = None
        """The next look at the queue, while messages gather there."""
        self.is_deleted = False
        """Whether this process has deleted the queue, or is about to."""
        self._inbox: Inbox[RabbitDelivery] = Inbox()
        self._delivering = 0, False
        """The delivery tag of the message that is arriving, and whether it was delivered before."""

    def __aiter__(self) -> "RabbitConsumer":
        return self

    async def __anext__(self) -> RabbitDelivery:
        try:
            return await self._inbox.get()
        except QueueNotFound:
            # Brokers also cancel consumers of queues that still exist: after a timeout or a change
            # of leader. To ask about a queue that is gone costs a channel, which the broker closes,
            # and every request ends with the deletion of a queue.
            if self.is_deleted or await self._inspect(self._queue) is None:
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
        self._link.listen(self._channel, self)
        self._is_exclusive = is_exclusive
        with translated(f"consume {self._queue}", self._channel):
            if prefetch:
                await self._channel.basic_qos(prefetch_count=prefetch)
            answer = await self._channel.basic_consume(
                self._queue, _on_message, exclusive=is_exclusive
            )
        self._tag = answer.consumer_tag or ""

    def gather(self, interval_s: float) -> None:
        if interval_s == self._gather_s or not self.is_open:
            return
        was_gathering, self._gather_s = self._gather_s > 0, interval_s
        if not was_gathering:
            self._send(marshal_cancel(self._channel, self._tag))
            self._fetch_later()
        elif not interval_s:
            self._stop_fetching()
            self._send(self._consume_frame())

    async def stop(self) -> None:
        self._stop_fetching()
        with suppress(BusUnavailable):
            await self._link.calls.run(self._stop(), f"stop consuming {self._queue}")
        self._inbox.end()

    async def close(self) -> None:
        self.is_over = True
        self._stop_fetching()
        with suppress(BusUnavailable):
            await self._link.calls.run(self._close(), f"close the consumer of {self._queue}")

    def ack(self, tag: int) -> None:
        self._send(marshal_ack(self._channel, tag))

    def reject(self, tag: int, *, requeue: bool) -> None:
        self._send(marshal_reject(self._channel, tag, requeue=requeue))

    def take_method(self, method: int, payload: bytes) -> bool:
        if method != Basic.Deliver.index:
            return False
        self._delivering = delivery_of(payload)
        return True

    def take_message(self, header: bytes, body: bytes) -> None:
        tag, is_redelivered = self._delivering
        message, num_returns = to_message(header, body, is_redelivered=is_redelivered)
        self._inbox.put(RabbitDelivery(tag, message, num_returns, self))

    def _send(self, frames: bytes) -> None:
        """Send frames, such as those that settle a delivery; no effect if the channel is closed,
        because the message is redelivered then."""
        if not (self.is_over or self._channel.is_closed):
            self._link.send(self._channel, frames)

    def _fetch_later(self) -> None:
        self._fetching = asyncio.get_running_loop().call_later(self._gather_s, self._fetch)

    def _fetch(self) -> None:
        """Receive what is in the queue: a consumer that ends as soon as it has begun receives all
        of it. No answer tells when."""
        if self.is_over or self._channel.is_closed or not self.is_open:
            return
        self._send(self._consume_frame() + marshal_cancel(self._channel, self._tag))
        self._fetch_later()

    def _stop_fetching(self) -> None:
        if self._fetching is not None:
            self._fetching.cancel()
            self._fetching = None

    def _consume_frame(self) -> bytes:
        return marshal_consume(
            self._channel, self._queue, self._tag, is_exclusive=self._is_exclusive
        )

    async def _stop(self) -> None:
        with suppress(BusError), translated(f"stop consuming {self._queue}", self._channel):
            await self._channel.basic_cancel(self._tag)
        self._inbox.end()

    async def _close(self) -> None:
        self._inbox.fail(BusUnavailable("the consumer is closed"))
        with suppress(BusError), translated(f"close the consumer of {self._queue}", self._channel):
            await close_channel(self._channel)

    def _on_cancel(self, _: Basic.Cancel) -> None:
        self._inbox.end(QueueNotFound(f"queue {self._queue} was deleted"))

    def _on_close(self, closing: "asyncio.Future[None]") -> None:
        error = None if closing.cancelled() else closing.exception()
        self._stop_fetching()
        if self._gather_s and is_absence(error):
            # Without a consumer, the broker does not tell of the end of a queue.
            self._inbox.end(QueueNotFound(f"queue {self._queue} was deleted"))
            return
        # Without a consumer tag, the error is the result of `start`.
        is_expected = is_asked_for(error) if self._tag else is_answer(error)
        if self.is_open and not (is_expected or self._channel.connection.is_closed):
            incidents.report("channel", "consumer cut off", error, queue=self._queue)
        self._inbox.fail(BusUnavailable(f"consuming {self._queue} was cut off: {error or ''}"))


async def _on_message(_: DeliveredMessage) -> None:
    """The callback that aiormq requires. The deliveries do not reach it."""
