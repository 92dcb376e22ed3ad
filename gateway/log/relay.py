"""The relay of a log to a client."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable
from functools import cached_property

from gateway.log.buffer import RelayBuffer, deadline_exceeded
from gateway.log.cursor import (
    Departure,
    Fate,
    Item,
    LogCursor,
    LogEnd,
    LogFacts,
    Retention,
    departure_of,
    fate_of,
)
from gateway.log.reading import EXPIRED, LogReading
from gateway.log.reply_queues import ReplyLog
from shared.bus.base import Bus, Queue
from shared.errors import (
    Cancelled,
    IdempotencyMismatch,
    InternalError,
    LogLost,
    StreamExpired,
    StreamNotFound,
    TakenOver,
    Unavailable,
    UndecodableMessage,
    WarrenError,
)
from shared.messages import Accepted, GenerationJob, JobClass, Release
from shared.messages.token_estimates import tokens_of
from shared.telemetry import incidents

logger = logging.getLogger(__name__)

_LOST = "The gateway lost the answer."


class LogRelay:
    """Relays a log to a client. `gateway.log.registry` creates and closes it."""

    def __init__(
        self,
        bus: Bus,
        log: ReplyLog,
        claim: Release,
        facts: LogFacts | None = None,
        deadline: float = math.inf,
        retention: Retention = Retention.KEPT,
    ) -> None:
        """Without ``facts`` the log may have another reader, which is asked to release it.
        ``deadline`` is in the event loop's time."""
        self.job: GenerationJob | None = None
        """The job that may be published again, if this client has just sent it."""
        self.lane: JobClass = "interactive"
        """The queue of the job."""
        self.began_at = time.monotonic()
        """Monotonic time."""
        self.repeats_earlier = False
        """Whether the log was already there when this client sent the request."""
        self.is_first = False
        """Whether no gateway had accepted the request before."""
        self.claim = claim
        self.request_id = claim.request_id
        self._log = log
        self._buffer = RelayBuffer(deadline)
        self.cursor = LogCursor(claim, facts)
        self.reading = LogReading(bus, log, self.cursor, self._buffer)
        self._task: asyncio.Task[None] | None = None
        self._catching_up: asyncio.Task[None] | None = None
        self._deadline = deadline
        self._retention = retention
        self._departure = Departure.ABORTED
        self._askers: set[str] = set()
        """Other readers that have asked for the log."""

    @property
    def queue(self) -> Queue:
        """The log's queue."""
        return self._log.queue

    @property
    def log_name(self) -> str:
        """The log's queue, and the routing key of its events."""
        return self._log.queue.name

    @property
    def body_hash(self) -> str:
        """The body hash of the log's request: see `LogFacts.body_hash`."""
        return self.cursor.reader.body_hash or self.claim.body_hash

    @property
    def worker(self) -> str | None:
        """The address of the current worker."""
        return self.cursor.reader.worker

    @cached_property
    def num_tokens(self) -> int:
        """About how many tokens the request has, if this client has just sent it."""
        return 0 if self.job is None else tokens_of(self.job)

    @property
    def is_answered(self) -> bool:
        """Whether a worker has started or rejected the job."""
        return self.cursor.has_started or self.has_ended

    @property
    def has_ended(self) -> bool:
        """Whether the end of the log was read."""
        return self.cursor.end is not LogEnd.OPEN

    @property
    def facts(self) -> LogFacts | None:
        return self.cursor.facts

    @property
    def tenant(self) -> str | None:
        """The tenant of the request; None if that is not known yet."""
        return self.facts.tenant if self.facts is not None else self.claim.tenant

    @property
    def key_id(self) -> str:
        """The API key with which the client sent the request to this gateway; empty if it sent the
        request elsewhere or has no key."""
        return "" if self.job is None else self.job.key_id

    @property
    def has_proved_its_right(self) -> bool:
        """Whether the reader's right to the log is proved: the request is new, or the log names its
        tenant."""
        claim = self.claim
        return claim.tenant is None or bool(claim.body_hash) or self.facts is not None

    @property
    def is_ended(self) -> bool:
        """Whether the terminal event has been taken."""
        return self._buffer.has_given_all

    @property
    def progress(self) -> tuple[int, int] | None:
        """Changes as the log progresses; None while the client takes nothing."""
        reader = self.cursor.reader
        return None if self._buffer.is_held_up else (reader.attempt, reader.ordinal)

    @property
    def fate(self) -> Fate:
        """The fate of the job and its log if the relay ends now."""
        departure = departure_of(
            self._departure,
            self._buffer.error,
            is_ours=self.reading.has_attached and self.has_proved_its_right,
        )
        return fate_of(
            departure,
            self.cursor.end,
            self._retention,
            has_key=bool(self.body_hash),
            is_detached=self.facts is not None and self.facts.is_detached,
        )

    async def find_log(self) -> None:
        """Find the queue in which the log was recreated, if it was. Raises `BusUnavailable`."""
        await self._log.find()

    def start(self) -> None:
        """Start reading."""
        self._task = asyncio.create_task(self._read())

    def take(self, timeout_s: float | None = None) -> Awaitable[list[Item]]:
        """Wait for accepted events; returns all that have arrived, or none after ``timeout_s``.

        After `Restarted` all events of the log are returned again, possibly divided otherwise; it
        never comes alone. Raises `DeadlineExceeded`, and the error that ended the relay before the
        end of the log.
        """
        return self._buffer.take(timeout_s)

    async def catch_up(self, accepted: Accepted) -> None:
        """Append ``accepted`` to the log, and return once everything up to it has been read.

        Raises the error that ended the relay, `DeadlineExceeded`, and `BusError`.
        """
        assert self._task is not None
        loop = asyncio.get_running_loop()
        catching_up = asyncio.create_task(self.reading.catch_up(accepted))
        self._catching_up = catching_up
        alarm = loop.call_at(self._deadline, self.fail, deadline_exceeded())
        try:
            await asyncio.wait([catching_up, self._task], return_when=asyncio.FIRST_COMPLETED)
            if catching_up.done() and not catching_up.cancelled():
                await catching_up
            if self._buffer.error is not None:
                raise self._buffer.error
            if not catching_up.done():
                raise StreamExpired(EXPIRED)
        finally:
            alarm.cancel()
            catching_up.cancel()
            self._catching_up = None

    def fail(self, error: WarrenError) -> None:
        """End with ``error`` after the buffered events."""
        self._buffer.fail(error)
        if self._catching_up is not None:
            self._catching_up.cancel()

    def give_up(self, error: WarrenError) -> None:
        """End with ``error`` after the buffered events, and stop reading."""
        self.fail(error)
        if self._task is not None:
            self._task.cancel()

    def close(self, departure: Departure) -> None:
        """Record why this reader leaves the log. Unless this is called, an error has broken the
        request."""
        self._departure = departure

    def objection(self, release: Release) -> str | None:
        """The code of the error with which to refuse a release of the log, if any."""
        if release.tenant is not None and self.tenant not in (None, release.tenant):
            return StreamNotFound.code
        if release.body_hash and release.body_hash != self.body_hash:
            return IdempotencyMismatch.code
        return None

    def is_overtaken(self, release: Release) -> bool:
        """Whether ``release`` comes from an earlier reader of the log and was delivered late.

        A reader that still waits for the log asks each second, so that its second request counts
        even if the gateways' clocks differ.
        """
        is_first = release.reader not in self._askers
        self._askers.add(release.reader)
        return is_first and 0 < release.claimed_at < self.claim.claimed_at

    def release(self, release: Release) -> None:
        """Release the log to another reader, or cancel the request."""
        if release.is_cancelled:
            self.fail(Cancelled("The request was cancelled."))
        else:
            self.give_up(TakenOver("Another connection has taken over this stream."))

    async def stop(self) -> None:
        """Stop reading, and release the log."""
        try:
            if self._task is not None:
                self._task.cancel()
                await asyncio.wait([self._task])
        finally:
            self._task = None
            await self.reading.close()

    async def _read(self) -> None:
        try:
            await self.reading.run()
        except asyncio.CancelledError as error:
            # It would keep all that was read, in a cycle.
            error.__traceback__ = None
            raise
        except (StreamNotFound, StreamExpired, Unavailable) as error:
            self.fail(error)
        except (LogLost, UndecodableMessage) as error:
            event = "log lost" if isinstance(error, LogLost) else "log not readable"
            facts = {"request_id": self.request_id, "reason": error.message}
            logger.warning(event, extra=facts)
            self.fail(error if isinstance(error, LogLost) else InternalError(_LOST))
        except Exception as error:  # noqa: BLE001 (a bug fails only this request)
            incidents.report("request", "log not read", error, request_id=self.request_id)
            self.fail(InternalError(_LOST))
