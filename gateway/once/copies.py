"""Copies of a log for other gateways, whose clients share its execution.

A log has a single reader. That gateway sends the others what it reads: a copy of the log so far,
and then each event. A gateway whose copy falls silent looks whether the log still has a reader, and
reads the log itself if it has none.
"""

import asyncio
import logging
import secrets
from contextlib import suppress

from gateway.log.cursor import LogCursor
from gateway.once.playback import Playback
from shared import topology
from shared.bus.base import Binding, Bus, Message
from shared.bus.subscribe import receive
from shared.errors import BusError, MessageTooLarge, Unavailable
from shared.log import Relay
from shared.messages import Failed, Follow, Release, Restored, Started, decode_event, encode

logger = logging.getLogger(__name__)

_ASK_INTERVAL_S = 0.5
_MAX_MISSING = 2
"""How often in a row a log has no reader before this gateway reads it."""
_MAX_SILENT = 40
"""How often in a row a reader is asked that sends nothing at all."""


async def send_copy(bus: Bus, playback: Playback, log: Binding) -> None:
    """Send the events of an execution to another gateway until its queue is gone or the events
    end."""
    position, reading = 0, -1
    try:
        while True:
            cursor, events = playback.cursor, playback.events
            if cursor is not None and events:
                news = events[position:]
                # A copy also says why an earlier run has ended, which no event does.
                if reading != playback.reading or any(isinstance(one, Started) for one in news):
                    reading, position = playback.reading, len(events)
                    await bus.publish(log, Message(encode(cursor.restored())))
                    news = [one for one in events if isinstance(one, Failed)]
                position = len(events)
                for event in news:
                    await bus.publish(log, Message(encode(event)))
            if playback.is_complete and position == len(playback.events):
                return
            if position == len(playback.events) and reading in (-1, playback.reading):
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
        self._queue = topology.copy_queue(secrets.token_hex(16))
        self._cursor: LogCursor | None = None

    async def run(self) -> None:
        """Read until the events are complete, or the log has no reader any more. Raises
        `Unavailable` if its reader sends nothing."""
        receiving = asyncio.create_task(receive(self._bus, self._queue, self._hear))
        try:
            await self._watch()
        finally:
            receiving.cancel()
            await asyncio.wait([receiving])
            with suppress(BusError):
                await self._bus.delete_queue(self._queue.name)

    async def _watch(self) -> None:
        num_missing, num_silent = 0, 0
        while not self._playback.is_complete:
            with suppress(BusError):
                has_reader = await self._has_reader()
                num_missing = 0 if has_reader else num_missing + 1
                if num_missing == _MAX_MISSING:
                    return
                if has_reader:
                    await self._ask()
            until = asyncio.get_running_loop().time() + _ASK_INTERVAL_S
            while asyncio.get_running_loop().time() < until and not self._playback.is_complete:
                await self._playback.wait_changed(until)
            num_silent = 0 if self._cursor is not None else num_silent + 1
            if num_silent == _MAX_SILENT:
                raise Unavailable("The gateway that reads this answer does not share it.")

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

    async def _ask(self) -> None:
        follow = Follow(request_id=self._execution_id, reply_to=self._queue.name)
        await self._bus.publish(topology.ALL_GATEWAYS, Message(encode(follow)))

    def _hear(self, message: Message) -> None:
        """Raises `UndecodableMessage`."""
        event = decode_event(message.body, message.content_type)
        cursor = self._cursor
        if isinstance(event, Restored):
            claim = Release(request_id=self._execution_id)
            self._cursor = cursor = LogCursor(claim, None)
            cursor.begin(is_renewed=True)
            self._playback.restart()
        if cursor is None:
            return
        events = [action.event for action in cursor.read(event) if isinstance(action, Relay)]
        if events:
            self._playback.add(events, cursor, is_complete=cursor.reader.is_ended)
