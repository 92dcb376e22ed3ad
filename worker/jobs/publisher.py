"""Events out: one request's replies, in order, in the encoding its job came in."""

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
    PublishUnconfirmed,
    WarrenError,
)
from shared.messages import ReplyEvent, encode

_RETRY_PAUSE_S = 0.2


class ReplyPublisher:
    """Publishes the events of one request to its reply queue."""

    def __init__(self, bus: Bus, delivery: Delivery, request_id: str) -> None:
        self._bus = bus
        self._binding: Binding = topology.reply_binding(delivery.message.reply_to)
        self._content_type = delivery.message.content_type
        self._correlation_id = delivery.message.correlation_id or request_id
        self._first: asyncio.Task[WarrenError | None] | None = None
        self._unsent: deque[ReplyEvent] = deque()
        """What the broker is not known to have: its place in the log is before all that follows."""

    @property
    def queue(self) -> str:
        """The reply queue's name, where the gateway named it after its key."""
        return self._binding.routing_key

    @property
    def has_unsent(self) -> bool:
        """A `publish` was cancelled, and `flush` is due."""
        return bool(self._unsent)

    def begin(self, event: ReplyEvent, on_failure: Callable[[WarrenError], None]) -> None:
        """Publish the first event while the caller goes on; `publish` waits for it.

        Where that fails, calls ``on_failure`` at once: all that the caller does is in vain.
        """
        self._first = asyncio.create_task(self._publish_first(event))
        self._first.add_done_callback(partial(_tell, on_failure))

    async def publish(self, event: ReplyEvent) -> None:
        """Return once the broker has the event. Raises `Unroutable` when nobody wants it.

        An event whose fate is unknown is sent again: its position in the log, or its ticket,
        tells readers that it is a repetition. One that was cancelled is such an event, and so is
        one whose publishing raised an error that is not the broker's answer: the next `publish`
        sends it again, before its own.
        """
        self._unsent.append(event)
        await self.flush()

    async def flush(self) -> None:
        """Return once the broker has all events, and those too whose `publish` was cancelled."""
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
        """Publish no more: what `begin` has begun must not outlive its answer."""
        if self._first is not None:
            self._first.cancel()

    async def _publish_first(self, event: ReplyEvent) -> WarrenError | None:
        """Returns what ends the run, where that fails."""
        try:
            await self._publish(event)
        except BusError as error:
            return error
        except Exception as error:  # noqa: BLE001 (whatever it is, it is reported)
            facts = {"request_id": self._correlation_id}
            incidents.report("job", "first event not published", error, **facts)
            self._unsent.appendleft(event)
            return InternalError("The worker failed on this request.")
        return None

    async def _publish(self, event: ReplyEvent) -> None:
        body = encode(event, self._content_type)
        while True:
            # A message for each try: brokers match what they return by its id.
            message = Message(
                body, content_type=self._content_type, correlation_id=self._correlation_id
            )
            try:
                return await self._bus.publish(self._binding, message)
            except (BusUnavailable, PublishUnconfirmed):
                await asyncio.sleep(_RETRY_PAUSE_S)
                await self._bus.wait_connected()


def _tell(
    on_failure: Callable[[WarrenError], None], first: "asyncio.Task[WarrenError | None]"
) -> None:
    error = None if first.cancelled() else first.result()
    if error is not None:
        on_failure(error)
