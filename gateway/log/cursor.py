"""Reads a request's log event by event, according to the log protocol.

The log is a reply queue whose messages are never acknowledged. A reading starts at the beginning of
the log, again after each lost connection, and passes on what it has not passed on before. While its
client does not take events, it returns the messages to the queue but keeps consuming with a
prefetch of one: a job whose log has no reader is cancelled.
"""

import asyncio
from contextlib import suppress

import msgspec

from gateway.log.buffer import RelayBuffer
from gateway.log.context import StreamContext, decode_context
from gateway.log.fate import LogEnd
from gateway.log.passed import Passed, Piece
from gateway.log.reply_queues import ReplyLog
from shared import topology
from shared.bus.base import Bus, Consumer, Message
from shared.errors import (
    BusUnavailable,
    PublishUnconfirmed,
    QueueBusy,
    QueueNotFound,
    StreamExpired,
    StreamNotFound,
    Unavailable,
    Unroutable,
)
from shared.log import LogReader, Relay, Send
from shared.messages import Accepted, Failed, Release, Started, decode_event, encode

NOT_FOUND = "There is no such stream."
EXPIRED = "This stream is no longer kept."
_TELLING = (Accepted, Started)
"""The events that describe the request."""
_MAX_AHEAD = 256
_MAX_SHARE_AHEAD = 0.25
_REATTACH_PAUSE_S = 0.05
_ASK_INTERVAL_S = 1.0
_PATIENCE_S = 30.0
"""Seconds for which another reader may hold the log. The broker disconnects a stopped gateway after
15 s."""


class LogReading:
    """Reads one log into a buffer."""

    def __init__(
        self,
        bus: Bus,
        log: ReplyLog,
        claim: Release,
        context: StreamContext | None,
        buffer: RelayBuffer,
    ) -> None:
        """``claim`` identifies the reader and its right to the log. Without a ``context`` the log
        provides it; it may then have another reader, which is asked to release it."""
        self.claim = claim
        self.context = context
        self._cut_off: set[str] = set()
        """Tickets of runs that were current when the connection to the broker was lost."""
        self.reader = self._new_reader()
        self.has_attached = context is not None
        """Whether this reader has held the log; true from the start for a new log."""
        self.has_started = False
        self.is_ended = False
        self.has_failed = False
        self.num_accepted = 0
        """The number of `Accepted` events in the log."""
        self.publication = 0
        """The newest publication that has started."""
        self._bus = bus
        self._log = log
        self._buffer = buffer
        self._passed = Passed()
        self._ordinal = 0
        self._marker = ""
        self._caught_up: asyncio.Future[None] | None = None
        self._is_ending = False
        self._has_ended = False
        self._ask_at = 0.0

    @property
    def end_of_log(self) -> LogEnd:
        if not self.is_ended:
            return LogEnd.OPEN
        return LogEnd.FAILED if self.has_failed else LogEnd.FINISHED

    async def run(self) -> None:
        """Read until cancelled, across lost connections.

        Raises `StreamNotFound` and `StreamExpired` if this reader has no log to read, `Unavailable`
        if another reader does not release it, and `QueueNotFound` if the log was lost.
        """
        try:
            async with asyncio.timeout(None if self.has_attached else _PATIENCE_S) as patience:
                await self._read_through_failures(patience)
        except TimeoutError:
            raise Unavailable("Another reader still has this stream.") from None
        except QueueNotFound:
            if not self.has_attached:
                raise StreamExpired(EXPIRED) from None
            if not self._is_ending and not self.claim.is_cancelled:
                raise

    async def catch_up(self, accepted: Accepted) -> None:
        """Append ``accepted`` to the log, and return once everything up to it has been read.

        Raises `BusError`.
        """
        message = Message(encode(accepted))
        self._marker = message.message_id
        self._caught_up = asyncio.get_running_loop().create_future()
        await self._bus.publish(self._log.queue.bindings[0], message)
        await self._caught_up

    async def end(self) -> None:
        """Cancel the job and delete the log. Raises `BusError`.

        If no worker has started the job, only the log is deleted: the worker that takes the job
        finds that its first event is `Unroutable`, and drops the job.
        """
        if self._has_ended:  # its name may belong to another log by now
            return
        self._is_ending = True
        for send in self.reader.cancel():
            await self._send(send)
        await self._bus.delete_queue(self._log.queue.name)
        self._has_ended = True

    async def close(self) -> None:
        """Release the log, if `run` did not get to start."""
        await self._log.close()

    async def _read_through_failures(self, patience: asyncio.Timeout) -> None:
        """``patience`` expires unless this attaches before."""
        while True:
            try:
                await self._read_from_start(patience)
                await self._hold()
            except QueueBusy:
                # Its reader was asked to release it, or is a reader whose lost connection the
                # broker has not noticed yet.
                await asyncio.sleep(_REATTACH_PAUSE_S)
            except (BusUnavailable, PublishUnconfirmed):
                if self.reader.ticket is not None:
                    self._cut_off.add(self.reader.ticket)
                await self._bus.wait_connected()
                await asyncio.sleep(_REATTACH_PAUSE_S)

    async def _read_from_start(self, patience: asyncio.Timeout) -> None:
        """Attach and read until the buffer is full. Nothing is acknowledged, so the queue keeps the
        log."""
        if not self.has_attached:
            await self._ask()
        consumer = await self._log.attach()
        self.has_attached = True
        patience.reschedule(None)
        try:
            self.reader, self.num_accepted = self._new_reader(), 0
            self._passed.begin()
            async for delivery in consumer:
                for send in self._read(delivery.message):
                    await self._send(send)
                if self._is_ahead:
                    await self._buffer.let_take()
                    if self._is_ahead:
                        return
        finally:
            await self._log.close()

    @property
    def _is_ahead(self) -> bool:
        """Whether the client has to take events before more are read.

        After that the log is read from its start again, so the longer it is, the more is read at
        once. Nothing is taken before this has caught up.
        """
        if self._caught_up is not None and not self._caught_up.done():
            return False
        return len(self._buffer) >= max(_MAX_AHEAD, self._ordinal * _MAX_SHARE_AHEAD)

    def _read(self, message: Message) -> list[Send]:
        """Process one event; returns the resulting commands."""
        event = decode_event(message.body, message.content_type)
        if isinstance(event, _TELLING):
            self._learn(event)
        sends = []
        for action in self.reader.read(event):
            if isinstance(action, Relay):
                self._pass_on(action)
            else:
                sends.append(action)
        if message.message_id == self._marker:
            self._tell_caught_up()
        return sends

    def _tell_caught_up(self) -> None:
        # The marker appears again whenever the log is read again.
        if self._caught_up is not None and not self._caught_up.done():
            self._caught_up.set_result(None)

    def _new_reader(self) -> LogReader:
        num_choices = self.context.total_drawn if self.context is not None else 1
        return LogReader(self.claim.request_id, num_choices, self._cut_off)

    def _learn(self, event: Accepted | Started) -> None:
        """Record what an event says about the request. Raises `StreamNotFound` if this reader has
        no right to it."""
        if isinstance(event, Accepted):
            self.num_accepted += 1
        else:
            self.publication = max(self.publication, event.publication)
        if self.context is None and (event.context or isinstance(event, Started)):
            self.context = self._checked(event.context)
            self.reader = self._new_reader()

    def _checked(self, encoded: bytes) -> StreamContext:
        try:
            context = decode_context(encoded)
        except msgspec.MsgspecError:  # another program's job
            raise StreamNotFound(NOT_FOUND) from None
        if self.claim.tenant not in (None, context.tenant):
            raise StreamNotFound(NOT_FOUND)
        return context

    def _pass_on(self, relay: Relay) -> None:
        """Pass on what was not passed on before the last reconnect."""
        self._ordinal = max(self._ordinal, relay.ordinal)
        event = self._news(relay.event)
        self.is_ended |= self.reader.is_ended
        if event is not None:
            self.has_failed = self.is_ended and isinstance(event, Failed)
            self._buffer.put(Relay(relay.ordinal, event))
        elif self.is_ended:  # the last event may be old if choices end differently this time
            self._buffer.wake()

    def _news(self, event: Started | Failed | Piece) -> Started | Failed | Piece | None:
        if isinstance(event, Started):
            has_started, self.has_started = self.has_started, True
            return None if has_started else event
        if isinstance(event, Failed):
            return None if self.is_ended else event
        return self._passed.split(event)[1]

    async def _hold(self) -> None:
        """Keep holding the log, with one message unacknowledged, until the buffer is empty.

        Raises `BusUnavailable` if the log is no longer held.
        """
        queue = self._log.queue.name
        async with self._bus.consume(queue, prefetch=1, is_exclusive=True) as consumer:
            holding = asyncio.create_task(_until_lost(consumer))
            taken = asyncio.create_task(self._buffer.wait_taken())
            try:
                await asyncio.wait([holding, taken], return_when=asyncio.FIRST_COMPLETED)
            finally:
                holding.cancel()
                taken.cancel()
                await asyncio.wait([holding, taken])
            for task in (holding, taken):
                if not task.cancelled():
                    task.result()

    async def _ask(self) -> None:
        """Announce the new reader to all gateways: current readers release the log, and gateways
        that wait for the client to return stop waiting."""
        now = asyncio.get_running_loop().time()
        if now >= self._ask_at:
            self._ask_at = now + _ASK_INTERVAL_S
            with suppress(Unroutable):  # all of them have just lost the broker
                await self._bus.publish(topology.ALL_GATEWAYS, Message(encode(self.claim)))

    async def _send(self, send: Send) -> None:
        # A worker that was replaced may be gone, and its queue with it.
        with suppress(Unroutable):
            await self._bus.publish(
                topology.worker_binding(send.address), Message(encode(send.command))
            )


async def _until_lost(consumer: Consumer) -> None:
    async for _ in consumer:
        pass
