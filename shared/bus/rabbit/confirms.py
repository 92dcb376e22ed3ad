"""A channel for publishing: encodes a message once, and takes confirmations in ranges.

A publish over aiormq 7.2.4 takes a task, a lock, a timeout and four futures, and encodes its fields
by reflection. Here, a publish is a future in a table.
"""

import asyncio
import struct
from dataclasses import dataclass
from itertools import takewhile

from aiormq import Channel
from pamqp.commands import Basic

from shared.bus.base import Binding, Message
from shared.bus.rabbit.encoding import marshal_publish, message_id_of, publish_error
from shared.bus.rabbit.frames import MessageFrames, confirmation_of
from shared.bus.rabbit.link import Link
from shared.errors import (
    BusError,
    BusUnavailable,
    PublishRefused,
    PublishUnconfirmed,
    Unroutable,
)

_CONFIRMATIONS = {Basic.Ack.index: True, Basic.Nack.index: False}
"""The methods that confirm a message, and whether the broker has accepted the message."""


@dataclass(slots=True)
class _Publish:
    """A message that the broker has not confirmed yet."""

    binding: Binding
    num_bytes: int
    message_id: str
    expires_at: float
    confirmed: "asyncio.Future[None]"
    is_returned: bool = False
    """The broker has returned the message, and confirms it afterwards."""

    @property
    def place(self) -> str:
        return f"{self.binding.exchange.name} for {self.binding.routing_key}"

    def end(self, error: BusError | None) -> None:
        """End the wait, unless the publisher has given up."""
        if self.confirmed.done():
            return
        if error is None:
            self.confirmed.set_result(None)
        else:
            self.confirmed.set_exception(error)


class ConfirmChannel(MessageFrames):
    """Publishes over one channel, for which the broker confirms each message."""

    __slots__ = (
        "_channel", "_idle", "_last_tag", "_link", "_pending", "_timeout_s", "_timer",
    )  # fmt: skip

    def __init__(self, channel: Channel, link: Link, timeout_s: float) -> None:
        """``channel`` is a new one of ``link``. ``timeout_s`` limits the wait for each
        confirmation."""
        super().__init__()
        self._channel = channel
        self._link = link
        self._timeout_s = timeout_s
        self._last_tag = 0
        self._pending: dict[int, _Publish] = {}
        """By delivery tag, in their order."""
        self._timer: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        channel.closing.add_done_callback(self._on_close)
        link.listen(channel, self)

    @property
    def is_closed(self) -> bool:
        return self.is_over or self._channel.is_closed

    def publish(self, binding: Binding, message: Message, user: str) -> "asyncio.Future[None]":
        """Publish a message; the future ends with its confirmation, or a `BusError`.

        A cancellation of the future has no effect: the message is sent all the same.
        """
        place = f"{binding.exchange.name} for {binding.routing_key}"
        if self.is_closed:
            raise BusUnavailable(f"publish to {place}: the channel was closed")
        try:
            frames = marshal_publish(self._channel, binding, message, user)
        except (TypeError, ValueError, OverflowError, struct.error) as error:
            raise BusError(f"publish to {place}: {error}") from error
        self._link.send(self._channel, frames)
        loop = asyncio.get_running_loop()
        expires_at = loop.time() + self._timeout_s
        confirmed: asyncio.Future[None] = loop.create_future()
        self._last_tag += 1
        self._pending[self._last_tag] = _Publish(
            binding, len(message.body), message.message_id, expires_at, confirmed
        )
        self._idle.clear()
        if self._timer is None:
            self._timer = loop.call_at(expires_at, self._expire)
        return confirmed

    async def wait_idle(self) -> None:
        """Return when nothing is unconfirmed."""
        await self._idle.wait()

    def take_method(self, method: int, payload: bytes) -> bool:
        is_accepted = _CONFIRMATIONS.get(method)
        if is_accepted is None:
            return method == Basic.Return.index
        tag, is_range = confirmation_of(payload)
        self._confirm(tag, is_range=is_range, is_accepted=is_accepted)
        return True

    def take_message(self, header: bytes, body: bytes) -> None:
        """Take a message that the broker returns because no queue is bound. If the message was
        published several times, each time fails."""
        message_id = message_id_of(header)
        for publish in self._pending.values():
            publish.is_returned |= publish.message_id == message_id

    def end(self) -> None:
        self._end(None)

    def _confirm(self, tag: int, *, is_range: bool, is_accepted: bool) -> None:
        last = tag or self._last_tag  # 0 means all
        tags = list(takewhile(last.__ge__, self._pending)) if is_range else [tag]
        for confirmed in tags:
            publish = self._pending.pop(confirmed, None)
            if publish is None:  # confirmed before
                continue
            if publish.is_returned:
                publish.end(Unroutable(f"no queue at {publish.place}"))
            elif is_accepted:
                publish.end(None)
            else:
                publish.end(PublishRefused(f"the broker refused a message to {publish.place}"))
        if not self._pending:
            self._idle.set()

    def _expire(self) -> None:
        """Give up the publishes that have waited for too long. Their confirmations may follow."""
        loop = asyncio.get_running_loop()
        self._timer = None
        for publish in self._pending.values():
            if publish.confirmed.done():
                continue
            if publish.expires_at > loop.time():
                self._timer = loop.call_at(publish.expires_at, self._expire)
                return
            publish.end(PublishUnconfirmed(f"no confirmation in time for {publish.place}"))

    def _on_close(self, closing: "asyncio.Future[None]") -> None:
        self._end(None if closing.cancelled() else closing.exception())

    def _end(self, cause: BaseException | None) -> None:
        """Fail everything that is unconfirmed. ``cause`` ended the channel."""
        self.is_over = True
        if self._timer is not None:
            self._timer.cancel()
        for publish in self._pending.values():
            publish.end(publish_error(cause, publish.binding, publish.num_bytes))
        self._pending.clear()
        self._idle.set()
