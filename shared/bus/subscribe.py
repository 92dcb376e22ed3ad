"""Consumers that attach again by themselves after they have lost their connection or queue."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Self

from shared.backoff import Backoff
from shared.bus.base import Bus, Consumer, Delivery, Exchange, Message, Queue
from shared.errors import BusUnavailable, QueueBusy, QueueNotFound, UndecodableMessage
from shared.telemetry import floods, incidents

logger = logging.getLogger(__name__)

_RETRY_PAUSE_S = 0.05
_MAX_FACTOR = 16


@dataclass(frozen=True, slots=True)
class Attached:
    """The queue is consumed from now on, starting with the message at its head."""

    was_deleted: bool
    """Whether the queue had been deleted, with its messages, and was declared again."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The queue is not consumed, because of ``error``; unsettled deliveries are back in it.

    `QueueBusy` means that another consumer holds the queue. Each failed attempt yields another
    `Lost`.
    """

    error: BusUnavailable | QueueNotFound | QueueBusy


def attaching() -> Backoff:
    """The pauses between attempts to attach to a queue. A consumer that ends returns all its
    deliveries, and the broker gives up a message that is returned too often."""
    return Backoff(_RETRY_PAUSE_S, _MAX_FACTOR * _RETRY_PAUSE_S)


class Subscription(AbstractAsyncContextManager["Subscription"]):
    """Consumes a queue until stopped, across reconnects. ``async with`` closes it.

    Iteration yields `Attached`, then deliveries in queue order; if the connection or the queue is
    lost it yields `Lost`, then `Attached` again once the queue is consumed again, and so on. Any
    other error of `Bus.declare` and `Bus.consume` is raised.
    """

    def __init__(
        self,
        bus: Bus,
        queue: str,
        *,
        prefetch: int = 0,
        is_exclusive: bool = False,
        declare: Sequence[Exchange | Queue] = (),
    ) -> None:
        """``prefetch`` and ``is_exclusive`` as for `Bus.consume`.

        ``declare`` is declared at the start, and again whenever the queue does not exist. If it is
        empty, iteration raises `QueueNotFound` then.
        """
        self._bus = bus
        self._queue = queue
        self._prefetch = prefetch
        self._is_exclusive = is_exclusive
        self._declare = declare
        self._is_declared = False
        self._was_deleted = False
        self._lost: Lost | None = None
        """The last failure, until attached again."""
        self._attached_at = 0.0
        self._backoff = attaching()
        self._is_stopped = False
        self._attaching: asyncio.Timeout | None = None
        self._consuming: AbstractAsyncContextManager[Consumer] | None = None
        self._consumer: Consumer | None = None

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delivery | Attached | Lost:
        try:
            if self._consumer is not None:
                return await anext(self._consumer)
            if self._is_stopped:
                raise StopAsyncIteration
            return await self._attach()
        except (BusUnavailable, QueueBusy) as error:
            lost = Lost(error)
        except QueueNotFound as error:
            if not self._declare:
                raise
            self._is_declared, self._was_deleted = False, True
            lost = Lost(error)
        was_attached = self._consumer is not None
        self._backoff.lasted(time.monotonic() - self._attached_at if was_attached else 0.0)
        if self._lost is None or type(lost.error) is not type(self._lost.error):
            facts = {"queue": self._queue, "reason": lost.error.message}
            logger.warning("cannot consume queue, retrying", extra=facts)
        self._lost = lost
        await self.close()
        return lost

    def gather(self, interval_s: float) -> None:
        """See `Consumer.gather`; it holds until the queue is attached again."""
        if self._consumer is not None:
            self._consumer.gather(interval_s)

    async def stop(self) -> None:
        """Stop accepting deliveries. Unsettled deliveries are kept until this is closed; iteration
        ends after them, or at once if the queue is not consumed."""
        self._is_stopped = True
        attaching, self._attaching = self._attaching, None
        if attaching is not None:
            attaching.reschedule(asyncio.get_running_loop().time())
        elif self._consumer is not None:
            await self._consumer.stop()

    async def close(self) -> None:
        """Stop consuming; unsettled deliveries return to the queue. No effect if that was done
        before."""
        consuming, self._consuming, self._consumer = self._consuming, None, None
        if consuming is not None:
            await consuming.__aexit__(None, None, None)

    async def _attach(self) -> Attached:
        try:
            async with asyncio.timeout(None) as self._attaching:  # expires when stopped
                self._consumer = consumer = await self._consume()
        except TimeoutError:
            if self._is_stopped:
                raise StopAsyncIteration from None
            raise
        finally:
            self._attaching = None
        if self._is_stopped:  # too late to interrupt it
            await consumer.stop()
        if self._lost is not None:
            logger.info("queue consumed again", extra={"queue": self._queue})
        self._attached_at = time.monotonic()
        attached = Attached(self._was_deleted)
        self._lost, self._was_deleted = None, False
        return attached

    async def _consume(self) -> Consumer:
        if self._lost is not None:
            await asyncio.sleep(self._backoff.pause_s)
        await self._bus.wait_connected()
        if not self._is_declared:
            await self._bus.declare(*self._declare)
            self._is_declared = True
        consuming = self._bus.consume(
            self._queue, prefetch=self._prefetch, is_exclusive=self._is_exclusive
        )
        consumer = await consuming.__aenter__()
        self._consuming = consuming
        return consumer


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering:
    """When messages are received several at once. Waking up for a message costs ten times as much
    as handling it."""

    many_per_s: float = 50.0
    """Messages gather when more than so many arrive in a second."""
    few_per_s: float = 25.0
    """They cease to gather when fewer arrive."""
    interval_s: float = 0.25
    """The longest delay of a message."""
    window_s: float = 1.0
    """For which messages are counted."""


class Rhythm:
    """Counts messages, and decides how they are received."""

    def __init__(self, gathering: Gathering, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` returns the time in seconds."""
        self._gathering = gathering
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """Receive messages as they come, and count them anew."""
        self.interval_s = 0.0
        """For `Consumer.gather`."""
        self._num_messages, self._began_at = 0, self._clock()

    def count(self) -> bool:
        """Count a message. Returns whether `interval_s` has changed."""
        self._num_messages += 1
        elapsed_s = self._clock() - self._began_at
        if elapsed_s < self._gathering.window_s:
            return False
        per_s = self._num_messages / elapsed_s
        before = self.interval_s
        if per_s > self._gathering.many_per_s:
            self.interval_s = self._gathering.interval_s
        elif per_s < self._gathering.few_per_s:
            self.interval_s = 0.0
        self._num_messages, self._began_at = 0, self._clock()
        return self.interval_s != before


async def receive(
    bus: Bus,
    queue: Queue,
    handle: Callable[[Message], None],
    on_attached: Callable[[], None] = lambda: None,
    gathering: Gathering | None = None,
) -> None:
    """Declare ``queue`` and pass each of its messages to ``handle``, until cancelled.

    Messages are acknowledged before they are handled. ``handle`` may raise `UndecodableMessage`;
    any other error is reported. ``on_attached`` is called whenever messages may have been missed
    and can be received from now on. Messages gather if ``gathering`` is given and they are many.
    """
    rhythm = None if gathering is None else Rhythm(gathering)
    async with Subscription(bus, queue.name, declare=(queue,)) as subscription:
        async for item in subscription:
            if isinstance(item, Attached):
                if rhythm is not None:
                    rhythm.begin()
                on_attached()
                continue
            if isinstance(item, Lost):
                continue
            await item.ack()
            if rhythm is not None and rhythm.count():
                subscription.gather(rhythm.interval_s)
            with incidents.survived("task", "message not handled", queue=queue.name):
                try:
                    handle(item.message)
                except UndecodableMessage as error:
                    facts = {"queue": queue.name, "reason": error.message}
                    event, user = "undecodable message dropped", item.message.user_id or ""
                    floods.warn(logger, event, "message dropped", facts, user)
