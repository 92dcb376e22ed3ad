"""The relay of a shared execution to one of its clients."""

import asyncio
import math
from typing import Literal, TypeAlias

from msgspec import structs

from gateway.log.buffer import deadline_exceeded
from gateway.log.cursor import NOT_FOUND, Departure, Fate, Item, LogFacts, departure_of
from gateway.log.relay import LogRelay
from gateway.log.reply_queues import ReplyLog
from gateway.once.playback import Playback, PlaybackPlace
from shared.bus.base import Bus
from shared.errors import StreamNotFound, WarrenError
from shared.messages import GenerationJob, Release

Share: TypeAlias = Literal["hit", "attached", "miss"]
"""How a request was answered: by an execution that had ended, by an execution of another request
that was running, or by its own execution."""


class SharedRelay(LogRelay):
    """Relays the events of an execution under the id of the client's own stream. It reads no log:
    `gateway.once.execution` does."""

    def __init__(
        self,
        bus: Bus,
        log: ReplyLog,
        claim: Release,
        playback: Playback,
        job: GenerationJob | None,
        deadline: float = math.inf,
        *,
        has_ids: bool,
    ) -> None:
        """``job`` is the job that would be published, if the client has just sent it. ``has_ids``:
        the client can return. ``deadline`` is in the event loop's time."""
        super().__init__(bus, log, claim, None, deadline)
        self.job = job
        self.has_ids = has_ids
        self.is_payer = False
        """Whether the execution is recorded as the use of this request."""
        self.joined_late = playback.is_complete
        """Whether the execution had ended before."""
        self._playback = playback
        self._ends_by = deadline
        self._error: WarrenError | None = None
        self._place = PlaybackPlace(playback)
        self._renamed: tuple[LogFacts, LogFacts] | None = None

    @property
    def share(self) -> Share:
        """How the request was answered."""
        if self.is_payer:
            return "miss"
        return "hit" if self.joined_late else "attached"

    @property
    def facts(self) -> LogFacts | None:
        """The facts of the execution, for this client's stream."""
        cursor = self._playback.cursor
        if cursor is None or cursor.facts is None:
            return None
        if self._renamed is None or self._renamed[0] is not cursor.facts:
            own = structs.replace(cursor.facts, stream_id=self.request_id)
            self._renamed = cursor.facts, own
        return self._renamed[1]

    @property
    def has_ended(self) -> bool:
        """Whether the end of the execution has arrived."""
        return self._playback.is_complete

    @property
    def is_ended(self) -> bool:
        """Whether the terminal event has been taken."""
        return self._place.is_at_end

    @property
    def has_failed(self) -> bool:
        """Whether this client alone gets no more events."""
        return self._error is not None

    @property
    def departure(self) -> Departure:
        """Why the client leaves, if it leaves now."""
        error = self._error or self._playback.error
        return departure_of(self._departure, error, is_ours=True)

    @property
    def fate(self) -> Fate:
        """The execution does not depend on a single client."""
        return Fate.STAYS

    async def take(self, timeout_s: float | None = None) -> list[Item]:
        """As `LogRelay.take`. Raises `StreamNotFound` if the execution is another tenant's."""
        loop = asyncio.get_running_loop()
        until = loop.time() + (timeout_s or math.inf)
        items = self._next()
        while not items and self._failure is None and loop.time() < until:
            await self._playback.wait_changed(min(self._ends_by, until))
            if loop.time() >= self._ends_by:
                self._error = self._error or deadline_exceeded()
            items = self._next()
        if not items and self._failure is not None:
            raise self._failure
        return items

    def fail(self, error: WarrenError) -> None:
        """End with ``error`` after the events that have arrived."""
        self._error = self._error or error
        self._playback.wake()

    def give_up(self, error: WarrenError) -> None:
        """As `fail`: nothing is read for this client alone."""
        self.fail(error)

    @property
    def _failure(self) -> WarrenError | None:
        return self._error or self._playback.error

    def _next(self) -> list[Item]:
        playback = self._playback
        if playback.cursor is None or not playback.events:
            return []
        self.cursor = playback.cursor
        facts = self.facts
        if facts is not None and self.claim.tenant not in (None, facts.tenant):
            raise StreamNotFound(NOT_FOUND)
        return self._place.take()
