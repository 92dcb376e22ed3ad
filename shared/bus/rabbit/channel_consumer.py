"""A consumer on its own channel: its frames, and the deliveries that they contain."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, cast

from aiormq import Channel
from aiormq.abc import DeliveredMessage, FrameType
from pamqp.body import ContentBody
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from shared.bus.base import Inbox, QueueState
from shared.bus.rabbit.channels import close_channel
from shared.bus.rabbit.encoding import is_answer, is_asked_for, num_returns, to_message, translated
from shared.bus.rabbit.shielded_calls import Calls
from shared.errors import BusError, BusUnavailable, QueueNotFound
from shared.telemetry import incidents

_NO_HEADER = ContentHeader()

OnDelivered = Callable[[DeliveredMessage], None]
Inspect = Callable[[str], Awaitable[QueueState | None]]
"""`Bus.inspect`."""


class Frames:
    """Replaces ``channel.frames``: deliveries go to ``on_delivered``, other frames to aiormq.

    aiormq passes every frame through a queue to a task of the channel and starts a task for every
    message. This accounts for most of the cost of a message (measured with aiormq 7.2.4: 2/5 of a
    gateway's CPU time).

    It is not a queue itself: an empty ``asyncio.Queue`` takes 3 KiB, and each stream has one of
    these.
    """

    __slots__ = (
        "_channel", "_deliver", "_header", "_num_missing", "_on_delivered", "_others", "_parts",
    )  # fmt: skip

    def __init__(self, channel: Channel, on_delivered: OnDelivered) -> None:
        self._channel = channel
        self._others: asyncio.Queue[tuple[int, FrameType]] = channel.frames
        self._on_delivered = on_delivered
        self._deliver: Basic.Deliver | None = None
        self._header = _NO_HEADER
        self._parts: list[bytes] = []
        self._num_missing = 0

    async def put(self, item: tuple[int, FrameType]) -> None:
        frame = item[1]
        if isinstance(frame, Basic.Deliver):
            self._deliver = frame
        elif self._deliver is None:
            await self._others.put(item)
        elif isinstance(frame, ContentHeader):
            self._header, self._parts = frame, []
            self._num_missing = frame.body_size or 0
            self._end_if_complete(self._deliver)
        elif isinstance(frame, ContentBody):
            self._parts.append(frame.value)
            self._num_missing -= len(frame.value)
            self._end_if_complete(self._deliver)
        else:  # the channel ends in the middle of a message
            self._deliver = None
            await self._others.put(item)

    async def get(self) -> tuple[int, FrameType]:
        return await self._others.get()

    def task_done(self) -> None:
        self._others.task_done()

    def _end_if_complete(self, deliver: Basic.Deliver) -> None:
        if self._num_missing <= 0:
            body = b"".join(self._parts)
            self._on_delivered(DeliveredMessage(deliver, self._header, body, self._channel))
            self._deliver, self._header, self._parts = None, _NO_HEADER, []


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

    def __init__(self, channel: Channel, queue: str, inspect: Inspect, calls: Calls) -> None:
        self._channel = channel
        self._queue = queue
        self._inspect = inspect
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
            if await self._inspect(self._queue) is None:
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
        await self._settle(partial(self._channel.basic_ack, tag, wait=False), "acknowledge")

    async def reject(self, tag: int, *, requeue: bool) -> None:
        settle = partial(self._channel.basic_reject, tag, requeue=requeue, wait=False)
        await self._settle(settle, "reject")

    async def _settle(self, settle: Callable[[], Awaitable[None]], doing: str) -> None:
        """Settle a delivery; no effect if the channel is closed, because the message is redelivered
        then."""
        with suppress(BusUnavailable):
            await self._calls.run(self._settled(settle), doing)

    async def _settled(self, settle: Callable[[], Awaitable[None]]) -> None:
        with suppress(BusError), translated("settle a delivery", self._channel):
            await settle()

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
        is_expected = is_asked_for(error) if self._tag else is_answer(error)
        if self.is_open and not (is_expected or self._channel.connection.is_closed):
            incidents.report("channel", "consumer cut off", error, queue=self._queue)
        self._inbox.fail(BusUnavailable(f"consuming {self._queue} was cut off: {error or ''}"))


async def _on_message(_: DeliveredMessage) -> None:
    """The callback that aiormq requires; `Frames` takes the deliveries first, so it is never
    called."""
