"""Attaches to a request's log and reads it into the buffer of its relay, across lost connections.

A reading is always in a `gateway.log.stages.Stage`. If the broker's node that keeps the log dies,
or the log is gone, the reader, which has read its tokens, begins the log again in another queue.

The log is a reply queue whose messages are never acknowledged. While its client does not take
events, the reader returns the messages to the queue but keeps consuming with a prefetch of 1: a job
whose log has no reader is cancelled.
"""

import asyncio
import logging
import math
import time
from contextlib import suppress
from enum import Enum, auto

from gateway.log.buffer import RelayBuffer
from gateway.log.cursor import LogCursor, LogEnd
from gateway.log.reply_queues import ReplyLog
from gateway.log.stages import Stage, Transition, after
from shared import topology
from shared.bus import retry
from shared.bus.base import Bus, Consumer, Message
from shared.bus.subscribe import attaching
from shared.bus.upkeep import report_unbound
from shared.errors import (
    BusError,
    BusUnavailable,
    LogLost,
    MessageTooLarge,
    NoFreeChannel,
    PublishRefused,
    PublishUnconfirmed,
    QueueBusy,
    QueueDown,
    QueueNotFound,
    QueueSilent,
    StreamExpired,
    Unavailable,
    Unroutable,
)
from shared.log import Relay, Send
from shared.messages import Accepted, Continue, Restored, decode_event, encode

logger = logging.getLogger(__name__)

EXPIRED = "This stream is no longer kept."
NODE_DOWN = "The broker's node that stores this stream is down."
_MAX_AHEAD = 256
_MAX_SHARE_AHEAD = 0.25
_DOWN_PAUSE_S = 0.25
_MAX_RECREATIONS = 100
_MAX_LOST = 3
"""So often a log is recreated that is gone although its node lives."""
_SILENT_S = 2.5
"""Seconds without an answer about a log, while the broker answers other calls, after which the log
counts as lost: a slow disk delays calls that concern a single queue, too."""
_ASK_INTERVAL_S = 1.0
_CHANNEL_PATIENCE_S = 8.0
_PATIENCE_S = 30.0
"""Seconds for which another reader may hold the log. The broker disconnects a stopped gateway after
15 s."""


class Ending(Enum):
    """How far a log's deletion has come. Any task may delete it, in any stage of the reading."""

    NOT_BEGUN = auto()
    BEGUN = auto()
    DONE = auto()


class Mark:
    """A message that a reader appends to its log: what comes before it was sent by then."""

    def __init__(self, *, is_needed: bool) -> None:
        """``is_needed``: whether the client may have been sent events of the log that this reader
        has not read yet."""
        self.is_needed = is_needed
        self._message_id = ""
        self._passed: asyncio.Future[None] | None = None

    @property
    def was_awaited(self) -> bool:
        """Whether a task has waited, or waits, for the mark."""
        return self._passed is not None

    @property
    def is_passed(self) -> bool:
        """Whether no task waits for the mark, and everything that a client may have been sent was
        read."""
        return not self.is_needed and not self.is_awaited

    @property
    def is_awaited(self) -> bool:
        return self._passed is not None and not self._passed.done()

    def expect(self) -> "asyncio.Future[None]":
        """A future that is done once the next mark was read."""
        self._passed = asyncio.get_running_loop().create_future()
        return self._passed

    def message(self, accepted: Accepted) -> Message:
        """The mark, to be published. It replaces an earlier mark that was not read yet."""
        message = Message(encode(accepted))
        self._message_id = message.message_id
        return message

    def read(self, message: Message) -> None:
        """Note that a message of the log was read. The mark is read again whenever the log is."""
        if message.message_id == self._message_id:
            self.is_needed = False
            if self._passed is not None and not self._passed.done():
                self._passed.set_result(None)


class Delays:
    """For how long a reading could not attach, and why."""

    def __init__(self) -> None:
        self.attached()

    def attached(self) -> None:
        self._backoff = attaching()
        self._silent_at = math.inf
        """When the log's node gave no answer first, in the event loop's time."""
        self._crowded_at = math.inf
        """When a channel was missing first, in the event loop's time."""

    def moved_on(self) -> None:
        """The log is now in another queue."""
        self._silent_at = math.inf

    def silenced(self) -> float:
        """The log's node gave no answer; returns the seconds since it gave none first."""
        now = asyncio.get_running_loop().time()
        self._silent_at = min(self._silent_at, now)
        return now - self._silent_at

    def crowded(self) -> float:
        """A channel was missing; returns the seconds since a channel was missing first."""
        now = asyncio.get_running_loop().time()
        self._crowded_at = min(self._crowded_at, now)
        return now - self._crowded_at

    async def pause(self) -> None:
        """Wait a moment, for longer after each attempt in a row that did not attach."""
        await asyncio.sleep(self._backoff.pause_s)
        self._backoff.lasted(0.0)


class LogReading:
    """Reads a log into a buffer."""

    def __init__(self, bus: Bus, log: ReplyLog, cursor: LogCursor, buffer: RelayBuffer) -> None:
        """If the cursor does not know the log's facts, the log may have another reader, which is
        asked to release it."""
        is_new = cursor.facts is not None
        self._stage = Stage.ATTACHING if is_new else Stage.CLAIMING
        self._ending = Ending.NOT_BEGUN
        self._end_lock = asyncio.Lock()
        self._bus = bus
        self._log = log
        self._cursor = cursor
        self._buffer = buffer
        self._has_job = is_new or bool(cursor.claim.body_hash)
        """Whether the client sent the job here, so that it can be published again."""
        self._mark = Mark(is_needed=not self._has_job)
        self._delays = Delays()
        self._num_read = 0
        """The number of messages of the log that are read; they are skipped when it is attached
        again, unless the connection was lost."""
        self._last_id = ""
        self.read_at = -math.inf
        """Monotonic time of the last message that was read."""
        self._copy: Restored | None = None
        """The copy with which the log is begun again, while it is `RECREATING` or `RESTORING`."""
        self._recreating: asyncio.Task[None] | None = None
        """Goes on if the reading is cancelled: others read the messages that it publishes."""
        self._fencing: set[asyncio.Task[None]] = set()
        self._num_lost = 0
        """How often the log was gone."""
        self._ask_at = 0.0

    @property
    def stage(self) -> Stage:
        return self._stage

    @property
    def has_attached(self) -> bool:
        """Whether this reader has held the log; true from the start for a new log."""
        return self._stage is not Stage.CLAIMING

    async def run(self) -> None:
        """Read until cancelled, across lost connections.

        Raises `StreamNotFound` and `StreamExpired` if this reader has no log to read, `Unavailable`
        if another reader does not release it, `LogLost`, and `UndecodableMessage`.
        """
        try:
            async with asyncio.timeout(None if self.has_attached else _PATIENCE_S) as patience:
                await self._read_through_failures(patience)
        except TimeoutError:
            raise Unavailable("Another reader still has this stream.") from None
        except QueueNotFound:
            if not self.has_attached:
                raise StreamExpired(EXPIRED) from None
            self._change(Transition.GONE)
            if self._ending is Ending.NOT_BEGUN and not self._cursor.claim.is_cancelled:
                raise LogLost("The gateway lost the answer.") from None

    async def catch_up(self, accepted: Accepted) -> None:
        """Append ``accepted`` to the log, and return once everything up to it has been read.

        Raises `BusError`.
        """
        passed = self._mark.expect()
        await self._append_mark(accepted)
        await passed

    async def end(self) -> None:
        """Cancel the job and delete the log, unless that was done before. Raises `BusError`."""
        if self._ending is Ending.NOT_BEGUN:
            self._ending = Ending.BEGUN
        async with self._end_lock:  # once it is deleted, its name may belong to another log
            if self._ending is Ending.DONE:
                return
            if self._recreating is not None:
                self._recreating.cancel()
            for send in self._cursor.cancel():
                with suppress(BusError):
                    await self._send(send)
            if self._stage is not Stage.LOST:
                await self._log.delete()
            self._ending = Ending.DONE

    async def close(self) -> None:
        """Release the log, if `run` did not get to start."""
        await self._log.close()

    def _change(self, transition: Transition) -> None:
        self._stage = after(self._stage, transition)

    async def _read_through_failures(self, patience: asyncio.Timeout) -> None:
        """``patience`` expires unless this attaches before."""
        while True:
            try:
                await self._read_ahead(patience)
                await self._hold()
            except QueueBusy:
                # Its reader was asked to release it, or is a reader whose lost connection the
                # broker has not noticed yet.
                await self._delays.pause()
            except QueueDown as error:
                if self._cursor.end is LogEnd.FAILED and self._cursor.reader.is_ended:
                    self._change(Transition.FAILED)
                    return  # a log that is begun again has no `Failed`; the buffer has it
                silent_s = self._delays.silenced()
                is_sure = not isinstance(error, QueueSilent) or silent_s >= _SILENT_S
                if self._has_read_all and is_sure:
                    self._move_on(error)
                else:  # its reader recreates it, its node returns, or the broker is only slow
                    self._change(Transition.SILENCED)
                    await self._wait_for_node(silent_s)
            except QueueNotFound as error:
                # Only its reader deletes a log. The log has expired while this reading could not
                # read it, or the broker has lost it.
                self._num_lost += 1
                if not (self._may_begin_again and self._num_lost <= _MAX_LOST):
                    raise
                self._move_on(error)
            except NoFreeChannel:
                await self._wait_for_channel()
            except (BusUnavailable, PublishUnconfirmed):
                self._cursor.cut_off()
                self._num_read = 0
                await self._bus.wait_connected()
                await self._delays.pause()

    async def _read_ahead(self, patience: asyncio.Timeout) -> None:
        """Attach and read until the buffer is full. Nothing is acknowledged, so the queue keeps the
        log."""
        consumer = await self._attach()
        self._change(Transition.ATTACHED)
        patience.reschedule(None)
        num_known = self._num_read
        if not num_known:
            self._cursor.begin(is_renewed=self._log.is_renewed)
        try:
            async for delivery in consumer:
                message = delivery.message
                if num_known:
                    num_known -= 1
                    if not num_known and message.message_id != self._last_id:
                        self._num_read = 0  # a broker that crashed unnoticed has lost the log's end
                        return
                    continue
                for send in self._read(message):
                    if isinstance(send.command, Continue):
                        await self._send(send)
                    else:
                        self._fence(send)
                if self._is_ahead:
                    await self._buffer.let_take()
                    if self._is_ahead:
                        return
        finally:
            self._change(Transition.DETACHED)
            await self._log.close()

    async def _attach(self) -> Consumer:
        if not self.has_attached:
            await self._ask()
            await self._log.find()
        if self._stage is Stage.RECREATING:
            assert self._copy is not None
            self._recreating = asyncio.create_task(self._recreate(self._copy))
            self._recreating.add_done_callback(_forget_error)
            await asyncio.shield(self._recreating)
        consumer = await self._log.attach()
        self._delays.attached()
        if self._mark.is_needed:
            with suppress(PublishRefused):
                await self._mark_or_bind()
        return consumer

    async def _mark_or_bind(self) -> None:
        """Append a mark to the log. A log that is read and has no binding has lost it while nobody
        read the log, and is bound again. Raises `BusError`."""
        accepted = Accepted(body_hash="")
        try:
            await self._append_mark(accepted)
        except Unroutable:
            with suppress(BusError):
                await self._bus.bind(self._log.queue)
                binding = self._log.queue.bindings[0]
                report_unbound(binding.exchange.name, binding.routing_key)
                await self._append_mark(accepted)

    async def _recreate(self, copy: Restored) -> None:
        """Declare the log and begin it with ``copy``, without which neither readers nor workers
        know the earlier events. The caller must not cancel it in between. If the log has a copy
        already, only the first copy counts.

        Raises `QueueDown` if that queue is lost, too, and `LogLost` if the copy cannot be sent.
        """
        body = encode(copy)
        for _ in range(_MAX_RECREATIONS):
            try:
                await self._log.declare()
                await self._bus.publish(self._log.queue.bindings[0], Message(body))
            except QueueDown:
                raise
            except MessageTooLarge as error:
                raise LogLost(error.message) from error
            except (BusUnavailable, PublishUnconfirmed, Unroutable, PublishRefused) as error:
                facts = {"request_id": self._cursor.claim.request_id, "reason": error.code}
                logger.warning("recreated log not begun, retrying", extra=facts)
                await retry.pause(self._bus, _DOWN_PAUSE_S)
            else:
                self._change(Transition.BEGUN)
                return
        raise LogLost("The recreated log cannot be begun.")

    async def _append_mark(self, accepted: Accepted) -> None:
        """Append ``accepted`` to the log, as a mark up to which it is to be read."""
        await self._bus.publish(self._log.queue.bindings[0], self._mark.message(accepted))

    @property
    def _is_ahead(self) -> bool:
        """Whether the client has to take events before more are read.

        After that the broker delivers the log from its start again, so the longer it is, the more
        is read at once. Nothing is taken before this has caught up.
        """
        num_ahead = len(self._buffer)
        if num_ahead < _MAX_AHEAD or num_ahead < self._cursor.num_events * _MAX_SHARE_AHEAD:
            return False
        return not self._mark.is_awaited

    def _read(self, message: Message) -> list[Send]:
        """Process an event; returns the resulting commands. Raises `UndecodableMessage`."""
        sends = []
        cursor, buffer = self._cursor, self._buffer
        event = decode_event(message.body, message.content_type)
        for action in cursor.read(event):
            if isinstance(action, Relay):
                buffer.put(action.event, is_last=cursor.reader.is_ended)
            elif isinstance(action, Send):
                sends.append(action)
            else:
                buffer.restart(action)
        if self._stage is Stage.RESTORING and not cursor.is_waiting:
            self._change(Transition.RESTORED)
            self._copy = None
        self._num_read += 1
        self.read_at = time.monotonic()
        self._last_id = message.message_id
        self._mark.read(message)
        return sends

    @property
    def is_recreating(self) -> bool:
        """Whether the log is lost, or may be, and only this reader has its contents."""
        is_held = self._log.is_attached or self._stage is Stage.HOLDING
        return self._has_moved or (self._has_read_all and not is_held)

    @property
    def _may_begin_again(self) -> bool:
        """Whether a log that is gone can be recreated, and its job published again."""
        claim = self._cursor.claim
        is_accepted = self._mark.was_awaited or not claim.body_hash
        is_ending = self._ending is not Ending.NOT_BEGUN
        is_wanted = self._cursor.end is LogEnd.OPEN and not (is_ending or claim.is_cancelled)
        return self._has_job and is_accepted and self._has_read_all and is_wanted

    @property
    def has_only_copy(self) -> bool:
        """Whether the contents of the log would be lost with this reader, as far as this gateway
        knows."""
        return self._has_moved or (self._has_read_all and self._stage is Stage.NODE_DOWN)

    @property
    def _has_moved(self) -> bool:
        """Whether the log is begun again, and the copy was not read there yet."""
        return self._stage in (Stage.RECREATING, Stage.RESTORING)

    @property
    def _has_read_all(self) -> bool:
        """Whether a copy of the events that were read contains everything that any client was
        sent."""
        return self.has_attached and self._mark.is_passed

    async def _wait_for_node(self, silent_s: float) -> None:
        """Wait a moment. Raises `Unavailable` if the log's node has been down for too long."""
        if silent_s > _PATIENCE_S:
            raise Unavailable(NODE_DOWN)
        await asyncio.sleep(_DOWN_PAUSE_S)

    async def _wait_for_channel(self) -> None:
        """Wait a moment. Raises `Unavailable` if there has been no free channel for too long: a
        worker cancels a job whose log has no reader."""
        if self._delays.crowded() > _CHANNEL_PATIENCE_S:
            raise Unavailable("The gateway has no free channel to the broker.")
        await self._delays.pause()

    def _move_on(self, error: QueueDown | QueueNotFound) -> None:
        """Begin the log again in another queue, with a copy of the events that were read."""
        facts = {"request_id": self._cursor.claim.request_id, "reason": error.message}
        logger.warning("log recreated", extra=facts)
        # Its worker may have been connected to that node, too, and lost the job without a crash.
        self._cursor.cut_off()
        self._copy = self._copy or self._cursor.restored()
        self._num_read = 0
        self._delays.moved_on()
        self._change(Transition.MOVED_ON)
        self._log.move_on()

    async def _hold(self) -> None:
        """Keep holding the log, with a single message unacknowledged, until the buffer is empty.

        Raises `BusUnavailable` if the log is no longer held.
        """
        queue = self._log.queue.name
        async with self._bus.consume(queue, prefetch=1, is_exclusive=True) as consumer:
            self._change(Transition.HELD)
            holding = asyncio.create_task(_until_lost(consumer))
            taken = asyncio.create_task(self._buffer.wait_taken())
            try:
                await asyncio.wait([holding, taken], return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._change(Transition.DETACHED)
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
            # Publishing fails if all gateways have just lost the broker, or if a gateway does not
            # read its commands.
            with suppress(Unroutable, PublishRefused):
                await self._bus.publish(topology.ALL_GATEWAYS, Message(encode(self._cursor.claim)))

    def _fence(self, send: Send) -> None:
        """Stop a run that was replaced. The log does not wait: the worker's queue may be on a node
        that is gone, and then the command is not confirmed until the broker notices."""
        task = asyncio.create_task(self._send(send))
        self._fencing.add(task)
        task.add_done_callback(self._fencing.discard)
        task.add_done_callback(_forget_error)

    async def _send(self, send: Send) -> None:
        # A worker that was replaced may be gone, and its queue with it. A worker that needs an
        # answer asks again.
        with suppress(Unroutable, PublishRefused):
            await self._bus.publish(
                topology.worker_binding(send.address), Message(encode(send.command))
            )


def _forget_error(task: "asyncio.Task[None]") -> None:
    """asyncio would log the error of a task whose waiter was cancelled."""
    if not task.cancelled():
        task.exception()


async def _until_lost(consumer: Consumer) -> None:
    async for _ in consumer:
        pass
