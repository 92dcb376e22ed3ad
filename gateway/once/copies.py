"""Copies of a log for other gateways, whose clients share its execution.

A log has a single reader. That gateway sends the others what it reads: a copy of the log so far,
and then each event. A gateway whose copy falls silent looks whether the log still has a reader, and
reads the log itself if it has none.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable
from contextlib import suppress

from gateway.log.cursor import LogCursor
from gateway.once.playback import Playback
from shared import topology
from shared.bus.base import Binding, Bus, Message, Queue
from shared.bus.subscribe import receive
from shared.errors import BusError, MessageTooLarge, Unavailable
from shared.log import Relay
from shared.messages import (
    Failed,
    Follow,
    Release,
    ReplyEvent,
    Restored,
    Started,
    decode_event,
    encode,
)

logger = logging.getLogger(__name__)

_ASK_INTERVAL_S = 0.5
_MAX_MISSING = 2
"""How often in a row a log has no reader before this gateway reads it."""
_MAX_SILENT = 40
"""How often in a row a reader is asked that sends nothing at all."""


class CopyWriter:
    """Says what another gateway needs to know to have the same events."""

    def __init__(self, playback: Playback) -> None:
        self._playback = playback
        self._position = 0
        self._reading = -1

    @property
    def has_taken_all(self) -> bool:
        """Whether all events that have arrived were taken."""
        is_same = self._reading == self._playback.reading
        return is_same and self._position == len(self._playback.events)

    @property
    def has_ended(self) -> bool:
        """Whether the last event of the log was taken."""
        return self._playback.is_complete and self.has_taken_all

    def take(self) -> list[ReplyEvent]:
        """What is to be sent next, in order: a copy of the log so far, or new events."""
        cursor, events = self._playback.cursor, self._playback.events
        if cursor is None or not events:
            return []
        news: list[ReplyEvent] = [*events[self._position :]]
        self._position = len(events)
        # A copy also says why an earlier run has ended, and which runs may fail: no event does.
        is_more = any(isinstance(event, Started | Failed) for event in news)
        if is_more or self._reading != self._playback.reading:
            self._reading = self._playback.reading
            return [cursor.copied(), *(one for one in events if isinstance(one, Failed))]
        return news


class Copy:
    """Reads the copy of a log into a playback."""

    def __init__(self, playback: Playback, new_cursor: Callable[[], LogCursor]) -> None:
        self._playback = playback
        self._new_cursor = new_cursor
        self.cursor: LogCursor | None = None
        """None until the copy begins."""

    def read(self, event: ReplyEvent) -> None:
        """Add what the next message of the copy says."""
        if isinstance(event, Restored):
            self.cursor = self._new_cursor()
            self.cursor.begin(is_renewed=True)
            self._playback.restart()
        cursor = self.cursor
        if cursor is None:
            return
        events = [action.event for action in cursor.read(event) if isinstance(action, Relay)]
        if events:
            self._playback.add(events, cursor, is_complete=cursor.reader.is_ended)


async def send_copy(bus: Bus, playback: Playback, log: Binding) -> None:
    """Send the events of an execution to another gateway until its queue is gone or the events
    end."""
    writer = CopyWriter(playback)
    try:
        while True:
            news = writer.take()
            for event in news:
                await bus.publish(log, Message(encode(event)))
            if writer.has_ended:
                return
            if not news:
                await playback.wait_changed(float("inf"))
    except MessageTooLarge as error:
        logger.warning("log not copied to a gateway", extra={"reason": error.message})
    except BusError:
        pass  # it is gone, or asks again


class CopyReader:
    """Reads the copy of a log that another gateway reads."""

    def __init__(self, bus: Bus, execution_id: str, playback: Playback) -> None:
        self._bus = bus
        self._execution_id = execution_id
        self._playback = playback
        self._copy = self._new_copy()
        self._num_attached = 0
        """How often the queue of the copy was attached to."""

    async def run(self) -> None:
        """Read until the events are complete, or the log has no reader any more. Raises
        `Unavailable` if its reader sends nothing."""
        while not await self._follow():
            logger.info("copy of a log lost", extra={"request_id": self._execution_id})

    async def _follow(self) -> bool:
        """Read a copy; returns False if messages of the copy may have been lost. The reader of the
        log does not notice a lost queue that is back before its next event, so another queue is
        needed to get another copy."""
        self._copy, self._num_attached = self._new_copy(), 0
        queue = topology.copy_queue(secrets.token_hex(16))
        receiving = asyncio.create_task(receive(self._bus, queue, self._hear, self._note_attached))
        try:
            await self._watch(queue)
        finally:
            receiving.cancel()
            await asyncio.wait([receiving])
            with suppress(BusError):
                await self._bus.delete_queue(queue.name)
        return not self._is_cut_off

    def _note_attached(self) -> None:
        self._num_attached += 1
        self._playback.wake()

    async def _watch(self, queue: Queue) -> None:
        num_missing, num_silent = 0, 0
        while not self._is_over:
            with suppress(BusError):
                has_reader = await self._has_reader()
                num_missing = 0 if has_reader else num_missing + 1
                if num_missing == _MAX_MISSING:
                    return
                if has_reader:
                    await self._ask(queue)
            until = asyncio.get_running_loop().time() + _ASK_INTERVAL_S
            while asyncio.get_running_loop().time() < until and not self._is_over:
                await self._playback.wait_changed(until)
            num_silent = 0 if self._copy.cursor is not None else num_silent + 1
            if num_silent == _MAX_SILENT:
                raise Unavailable("The gateway that reads this answer does not share it.")

    @property
    def _is_cut_off(self) -> bool:
        """Whether messages of the copy may have been lost."""
        return self._num_attached > 1

    @property
    def _is_over(self) -> bool:
        return self._playback.is_complete or self._is_cut_off

    def _new_copy(self) -> Copy:
        claim = Release(request_id=self._execution_id)
        return Copy(self._playback, lambda: LogCursor(claim, None))

    async def _has_reader(self) -> bool:
        key = topology.reply_key(self._execution_id)
        while True:
            state = await self._bus.inspect(key)
            if state is not None and state.num_consumers:
                return True
            later = await topology.find_later_log(self._bus, key)
            if later is None:
                return False
            key = later

    async def _ask(self, queue: Queue) -> None:
        follow = Follow(request_id=self._execution_id, reply_to=queue.name)
        await self._bus.publish(topology.ALL_GATEWAYS, Message(encode(follow)))

    def _hear(self, message: Message) -> None:
        """Raises `UndecodableMessage`."""
        self._copy.read(decode_event(message.body, message.content_type))
