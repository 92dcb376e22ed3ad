"""A shared execution at this gateway: it reads the log for all clients that share it.

The events come from the stored answer, from the log, or from the gateway that reads the log: see
`gateway.once.copies`. If that gateway or the log is gone, this gateway reads the log, and if there
is none, publishes the job again. Equal requests have equal answers, so no client notices more than
a pause.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import NamedTuple

from msgspec import structs

from gateway.log.cursor import Departure, LogFacts
from gateway.log.registry import Relays
from gateway.log.relay import LogRelay
from gateway.log.reply_queues import ReplyQueues
from gateway.once.answers import AnswerShelf
from gateway.once.copies import CopyReader, send_copy
from gateway.once.playback import Playback
from gateway.once.relay import SharedRelay
from shared import topology
from shared.bus.base import Bus
from shared.errors import (
    Cancelled,
    InternalError,
    ShuttingDown,
    StreamExpired,
    TakenOver,
    Unavailable,
    WarrenError,
)
from shared.messages import GenerationJob, JobClass, Release
from shared.telemetry import incidents

logger = logging.getLogger(__name__)

_MAX_TRIES = 3
_RETRY_PAUSE_S = 0.2
_MOVING_S = 5.0
"""Seconds for which an execution goes on although its last client here has gone to another
gateway, or another gateway may have clients of it."""


class ExecutionTerms(NamedTuple):
    """How an execution is begun."""

    job: GenerationJob
    facts: LogFacts
    lane: JobClass
    numerics: str
    """The numerics of the workers that may run the job."""


class Sources(NamedTuple):
    """Where the events of executions come from."""

    bus: Bus
    relays: Relays
    queues: ReplyQueues
    shelf: AnswerShelf
    grace_s: float
    """Seconds in which a client that has disconnected may return."""


class SharedExecution:
    """An execution and its clients at this gateway."""

    def __init__(
        self, execution_id: str, sources: Sources, on_idle: Callable[["SharedExecution"], None]
    ) -> None:
        """``on_idle`` is called when nobody needs it any more."""
        self.execution_id = execution_id
        self.playback = Playback()
        self.relays: dict[str, SharedRelay] = {}
        """The relays to clients by the ids of their streams."""
        self._sources = sources
        self._on_idle = on_idle
        self._terms: ExecutionTerms | None = None
        """None: no client here has sent the request, so that it cannot be published."""
        self._awaited: dict[str, asyncio.TimerHandle] = {}
        """The streams whose clients may return, and other reasons to go on for a while."""
        self._copies: dict[str, asyncio.Task[None]] = {}
        """The copies for other gateways, by the routing keys of their queues."""
        self._is_reading = False
        """Whether this gateway reads the log."""
        self._is_leaving = False
        self._task: asyncio.Task[None] | None = None

    @property
    def ends_by(self) -> float:
        """The deadline of its job, a Unix time; infinite if it is not known."""
        deadline = None if self._terms is None else self._terms.job.deadline
        return float("inf") if deadline is None else deadline

    def holds(self, stream_id: str) -> bool:
        """Whether it has the stream's client, or waits for it."""
        return stream_id in self.relays or stream_id in self._awaited

    def join(self, relay: SharedRelay, terms: ExecutionTerms | None) -> None:
        """Add a client."""
        self._terms = self._terms or terms
        self._forget(relay.request_id)
        self.relays[relay.request_id] = relay
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    def leave(self, relay: SharedRelay) -> None:
        """Remove a client, which may return."""
        if self.relays.get(relay.request_id) is relay:
            del self.relays[relay.request_id]
        match relay.departure:
            case Departure.LEFT if relay.has_ids:
                self._await(relay.request_id, self._sources.grace_s)
            case Departure.DISPLACED | Departure.DRAINED:
                self._await("", _MOVING_S)
        self._end_if_unwanted()

    def obey(self, release: Release) -> None:
        """Release the stream of a client that has returned elsewhere, or cancel it, if the sender
        has a right to it."""
        relay = self.relays.get(release.request_id)
        if relay is None:
            if not self._permits(release):
                return
            self._forget(release.request_id)
            if not release.is_cancelled:
                self._await("", _MOVING_S)
            self._end_if_unwanted()
        elif relay.claim.reader != release.reader and relay.objection(release) is None:
            relay.release(release)

    def copy_to(self, reply_to: str) -> None:
        """Copy the log to the queue of another gateway, if this gateway reads it."""
        if not self._is_reading or reply_to in self._copies:
            return
        log = topology.reply_binding(reply_to)
        copying = asyncio.create_task(send_copy(self._sources.bus, self.playback, log))
        self._copies[reply_to] = copying
        copying.add_done_callback(partial(self._copied, reply_to))

    async def close(self) -> None:
        """Leave the log to other gateways."""
        self._is_leaving = True
        tasks = list(self._copies.values())
        if self._task is not None:
            self._task.cancel()
            tasks.append(self._task)
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)

    def _permits(self, release: Release) -> bool:
        cursor = self.playback.cursor
        facts = None if cursor is None else cursor.facts
        return facts is None or release.tenant in (None, facts.tenant)

    def _copied(self, reply_to: str, task: "asyncio.Task[None]") -> None:
        self._copies.pop(reply_to, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            incidents.report("request", "log not copied", error, request_id=self.execution_id)
        # A gateway that has lost its connection asks for another copy.
        self._await("", _MOVING_S)
        self._end_if_unwanted()

    def _await(self, name: str, seconds: float) -> None:
        if seconds and not self.playback.is_complete:
            self._forget(name)
            loop = asyncio.get_running_loop()
            self._awaited[name] = loop.call_later(seconds, self._give_up_on, name)

    def _forget(self, name: str) -> None:
        alarm = self._awaited.pop(name, None)
        if alarm is not None:
            alarm.cancel()

    def _give_up_on(self, name: str) -> None:
        self._forget(name)
        self._end_if_unwanted()

    def _end_if_unwanted(self) -> None:
        if self.relays or self._awaited or self._copies:
            return
        task = self._task
        if task is not None and not task.done() and not self.playback.is_complete:
            task.cancel()
        self._on_idle(self)

    async def _run(self) -> None:
        try:
            await self._play()
        except WarrenError as error:
            self.playback.fail(error)
        except Exception as error:  # noqa: BLE001 (a bug fails only these requests)
            incidents.report("request", "shared log not read", error, request_id=self.execution_id)
            self.playback.fail(InternalError("The gateway lost the answer."))

    async def _play(self) -> None:
        """Add all events. Raises the error with which the execution cannot go on."""
        if await self._sources.shelf.load(self.execution_id, self.playback):
            for relay in self.relays.values():
                relay.joined_late = True
            return
        num_tries = 0
        while not self.playback.is_complete:
            try:
                await self._read_log()
            except TakenOver:
                logger.info("shared log read elsewhere", extra={"request_id": self.execution_id})
                reader = CopyReader(self._sources.bus, self.execution_id, self.playback)
                await reader.run()
            except ShuttingDown:
                raise
            except Cancelled:
                self._terms = self._terms_of_others()
                if self._terms is None:
                    raise
            except (Unavailable, StreamExpired):
                num_tries += 1
                if num_tries == _MAX_TRIES or self._terms is None:
                    raise
                await asyncio.sleep(_RETRY_PAUSE_S)

    async def _read_log(self) -> None:
        """Read the log to its end, and keep the answer. Raises the error of its relay."""
        async with self._opened() as relay:
            try:
                await self._pass_on(relay)
            except Unavailable:
                relay.close(Departure.LEFT)
                raise
            except asyncio.CancelledError:
                if self._is_leaving:
                    relay.close(Departure.LEFT)
                raise
            relay.close(Departure.SERVED)
        if self._terms is not None and not self.playback.has_failed:
            await self._sources.shelf.put(
                self.execution_id, relay.cursor, self.playback.events, self._terms.numerics
            )

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[LogRelay]:
        relays, terms = self._sources.relays, self._terms
        if terms is None:
            async with relays.resume(self.execution_id, None) as relay:
                yield relay
            return
        log = self._sources.queues.named(self.execution_id, may_exist=True)
        async with relays.open(log, terms.job, terms.facts, lane=terms.lane) as relay:
            self._note_beginning(relay)
            yield relay

    def _note_beginning(self, relay: LogRelay) -> None:
        if not relay.is_first:
            # Another gateway may have clients, and asks for a copy.
            self._await("", _MOVING_S)
        elif not any(one.is_payer for one in self.relays.values()):
            for one in self._unfailed():
                one.is_payer = True
                break
        for one in self.relays.values():
            one.joined_late |= relay.has_ended

    async def _pass_on(self, relay: LogRelay) -> None:
        self._is_reading = True
        self.playback.restart()
        try:
            while not relay.is_ended:
                items = await relay.take()
                if items:
                    self.playback.add(items, relay.cursor, is_complete=relay.is_ended)
        finally:
            self._is_reading = False
            if not self.playback.is_complete:
                for copying in list(self._copies.values()):
                    copying.cancel()

    def _terms_of_others(self) -> ExecutionTerms | None:
        """The terms of a client whose API key was not revoked, after the execution was
        cancelled."""
        terms = self._terms
        if terms is None:
            return None
        for relay in self._unfailed():
            if relay.job is not None and relay.job.key_id != terms.job.key_id:
                return terms._replace(job=_with_key(terms.job, relay.job))
        return None

    def _unfailed(self) -> Iterator[SharedRelay]:
        return (relay for relay in self.relays.values() if not relay.has_failed)


def _with_key(job: GenerationJob, other: GenerationJob) -> GenerationJob:
    """``job`` with the API key and the deadline of an equal job."""
    return structs.replace(job, key_id=other.key_id, deadline=other.deadline)
