"""Publishes a request's events in order, in the encoding of its job."""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial

from shared import incidents, topology
from shared.bus.base import Binding, Bus, Delivery, Message
from shared.errors import (
    BusError,
    BusUnavailable,
    InternalError,
    PublishRefused,
    PublishUnconfirmed,
    WarrenError,
)
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
        self._first: asyncio.Task[WarrenError | None] | None = None
        self._unsent: deque[ReplyEvent] = deque()
        """Events whose confirmation is missing; they precede all later events in the log."""

    @property
    def queue(self) -> str:
        """The name of the reply queue, if the gateway named it after its routing key."""
        return self._binding.routing_key

    @property
    def has_unsent(self) -> bool:
        """Whether a `publish` was cancelled, so that `flush` is needed."""
        return bool(self._unsent)

    def begin(self, event: ReplyEvent, on_failure: Callable[[WarrenError], None]) -> None:
        """Publish the first event in the background; the next `publish` waits for it.

        If that fails, ``on_failure`` is called at once, because the caller's further work is
        useless.
        """
        self._first = asyncio.create_task(self._publish_first(event))
        self._first.add_done_callback(partial(_tell, on_failure))

    async def publish(self, event: ReplyEvent) -> None:
        """Return once the broker has confirmed the event. Raises `Unroutable` if the log does not
        exist.

        An event without a confirmation is sent again before the next one: readers recognize the
        repetition by its position in the log, or by its ticket. This includes events whose publish
        was cancelled or raised an error that was not the broker's response.
        """
        self._unsent.append(event)
        await self.flush()

    async def flush(self) -> None:
        """Return once the broker has confirmed all events, including those whose `publish` was
        cancelled."""
        if self._first is not None:
            error = await asyncio.shield(self._first)
            if isinstance(error, BusError):
                raise error
            self._first = None
        while self._unsent:
            event = self._unsent.popleft()
            try:
                await self._publish(event)
            except BusError:
                raise
            except BaseException:
                self._unsent.appendleft(event)
                raise

    def close(self) -> None:
        """Stop publishing and cancel the task of `begin`."""
        if self._first is not None:
            self._first.cancel()

    async def _publish_first(self, event: ReplyEvent) -> WarrenError | None:
        """Publish the first event; returns the error that ends the run, if it fails."""
        try:
            await self._publish(event)
        except BusError as error:
            return error
        except Exception as error:  # noqa: BLE001 (any error is reported)
            facts = {"request_id": self._correlation_id}
            incidents.report("job", "first event not published", error, **facts)
            self._unsent.appendleft(event)
            return InternalError("The worker failed on this request.")
        return None

    async def _publish(self, event: ReplyEvent) -> None:
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


def _tell(
    on_failure: Callable[[WarrenError], None], first: "asyncio.Task[WarrenError | None]"
) -> None:
    error = None if first.cancelled() else first.result()
    if error is not None:
        on_failure(error)
