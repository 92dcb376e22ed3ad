"""The reader of a request's log, without clock or I/O: the events that it relays, the commands that
it sends, the facts that it has learned about the request, and the fate of the log when it leaves.

A reading starts at the beginning of the log, and again after each lost connection, because the
broker may have lost the log's end and a worker may have written it again, divided into other
events. What follows `Restarted` is the whole log. A renderer starts again too, and skips what its
client has been sent.
"""

from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct

from shared.errors import (
    IdempotencyMismatch,
    StreamExpired,
    StreamNotFound,
    TakenOver,
    Unavailable,
    WarrenError,
)
from shared.log import Action, Kept, LogCopy, LogReader, Relay, Send, is_acceptance
from shared.messages import (
    MAX_CHOICES,
    Accepted,
    Failed,
    Finished,
    HandedOver,
    PromptScores,
    Release,
    ReplyEvent,
    Restored,
    Started,
    TokenDelta,
)

_DISPLACING = (TakenOver, StreamNotFound, StreamExpired, IdempotencyMismatch)
NOT_FOUND = "There is no such stream."
LogEvent: TypeAlias = Started | PromptScores | TokenDelta | Finished | Failed
"""An accepted event."""


class LogFacts(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The facts that a gateway must know of a request to read its log. Sent with the job and
    returned in `Started`, so that any gateway can read the log."""

    tenant: str = ""
    body_hash: str = ""
    """The hash of the body of a request with an Idempotency-Key or of a line of a batch; otherwise
    empty."""
    num_choices: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    """The number of choices of all prompts."""
    is_detached: bool = False
    """The request continues without a client."""
    trace_id: str = ""
    """For log lines."""
    rendering: bytes = b""
    """How to render the log. Opaque to `gateway.log`."""
    stream_id: str = ""
    """The id by which the client knows the log, if several clients share it; empty if it is the
    id in ``rendering``. No log contains it."""

    def encode(self) -> bytes:
        """Encode for `GenerationJob.context`."""
        return _ENCODER.encode(self)


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(LogFacts)


def decode_facts(context: bytes) -> LogFacts:
    """Raises `msgspec.MsgspecError` if another program wrote these bytes."""
    try:
        return _DECODER.decode(context)
    except RecursionError as error:
        raise msgspec.DecodeError(str(error)) from None


class Retention(Enum):
    """How long a log is kept once its client has been sent its end. Decided when the log is
    opened."""

    NONE = auto()
    """Not at all."""
    GRACE = auto()
    """For the grace period: the client can return for the last bytes, because only their sending is
    known, not their arrival."""
    KEPT = auto()
    """Until it expires, for later requests."""


class Departure(Enum):
    """Why a reader leaves a log."""

    SERVED = auto()
    """The client was sent everything."""
    REFUSED = auto()
    """The client was sent an HTTP error instead of a stream."""
    LEFT = auto()
    """The client disconnected. It can return, because it has the stream's id."""
    ABANDONED = auto()
    """The client disconnected, or was turned away, before it was sent the stream's id."""
    DRAINED = auto()
    """The gateway shuts down; the client was asked to return to another gateway."""
    ABORTED = auto()
    """The request was cancelled, its deadline has passed, or an error broke it."""
    DISPLACED = auto()
    """The log belongs to another reader, or the right to it was not proved."""


class LogEnd(Enum):
    """How far a log has come."""

    OPEN = auto()
    FINISHED = auto()
    FAILED = auto()
    """The log ends with `Failed`."""


class Fate(Enum):
    """The fate of a job and its log when a reader leaves."""

    STAYS = auto()
    """Both continue without this reader; the log expires."""
    WAITS = auto()
    """Both continue for the grace period, and end unless the client returns."""
    ENDS = auto()
    """The job is cancelled and the log deleted."""


_KNOWS_ID = (Departure.SERVED, Departure.LEFT)


def departure_of(said: Departure, error: WarrenError | None, *, is_ours: bool) -> Departure:
    """Why a reader leaves that gave ``said`` as its reason and whose reading ended with ``error``.

    ``is_ours``: whether it has held the log, and its right to it was proved.
    """
    if not is_ours or isinstance(error, _DISPLACING):
        return Departure.DISPLACED
    if isinstance(error, Unavailable):
        return Departure.DRAINED if said in _KNOWS_ID else Departure.ABANDONED
    return said if error is None else Departure.ABORTED


def fate_of(
    departure: Departure,
    end: LogEnd,
    retention: Retention,
    *,
    has_key: bool = False,
    is_detached: bool = False,
) -> Fate:
    """The fate of a job and its log.

    ``has_key``: the client can return with its Idempotency-Key. ``is_detached``: the job does not
    need a client.
    """
    is_retried = end is LogEnd.FAILED and has_key and not is_detached
    match departure:
        case Departure.DISPLACED | Departure.DRAINED:
            return Fate.STAYS
        case Departure.ABORTED:
            return Fate.ENDS
        case Departure.ABANDONED if not has_key:
            return Fate.ENDS
        case Departure.LEFT | Departure.ABANDONED:
            goes_on_alone = end is not LogEnd.OPEN or is_detached
            return Fate.STAYS if goes_on_alone else Fate.WAITS
        case Departure.SERVED | Departure.REFUSED if end is LogEnd.OPEN or is_retried:
            return Fate.ENDS
        case Departure.SERVED:
            return _AFTER_END[retention]
        case Departure.REFUSED:
            return Fate.STAYS if retention is Retention.KEPT else Fate.ENDS


_AFTER_END = {
    Retention.NONE: Fate.ENDS,
    Retention.GRACE: Fate.WAITS,
    Retention.KEPT: Fate.STAYS,
}


def do_nothing() -> None:
    pass


class Restarted(msgspec.Struct, frozen=True):
    """The log is read from its start again."""


Item: TypeAlias = LogEvent | Restarted


class LogCursor:
    """Reads a log, any number of times."""

    def __init__(self, claim: Release, facts: LogFacts | None) -> None:
        """``claim`` identifies the reader and its right to the log. Without ``facts`` the log
        provides them."""
        self.claim = claim
        self.facts = facts
        self.end = LogEnd.OPEN
        """How the log ended, in this reading or an earlier reading."""
        self.on_start: Callable[[], object] = do_nothing
        """Called when a run has become the log's writer."""
        self.num_accepted = 0
        """How often gateways have accepted the request."""
        self.publication = 0
        """The newest publication that has started."""
        self.has_started = False
        self.is_deserted = False
        """Whether the log was recreated, and the newest run has not asked since where to
        continue."""
        self.is_untouched = False
        """Whether the log was recreated, and no run has written to it since."""
        self._copy = LogCopy()
        """The copy of the log that the current reading makes."""
        self._best_copy = self._copy
        """The longest copy of any reading."""
        self._is_renewed = False
        self._cut_off: set[str] = set()
        """Tickets of runs that were current when the connection to the broker was lost."""
        self._farthest = 0
        self._is_restarting = False
        self.lost_runs: list[int] = []
        """`LogReader.num_lost_runs` at each accepted `Started` of this reading."""
        self.reader = self._new_reader()

    @property
    def num_events(self) -> int:
        """The number of accepted events in the longest reading."""
        return max(self._farthest, self.reader.ordinal)

    @property
    def is_waiting(self) -> bool:
        """Whether the copy at the start of a recreated log was not read yet."""
        return self.reader.is_waiting

    def restored(self) -> Restored:
        """A copy of the log, as far as it was read in this or an earlier reading."""
        return self._best_copy.restored()

    def copied(self) -> Restored:
        """A copy of the log, as far as it was read in this reading: what is read next follows it,
        even if the events are divided otherwise than in an earlier reading."""
        return self._copy.restored()

    def begin(self, *, is_renewed: bool = False) -> None:
        """Start at the beginning of the log. ``is_renewed``: the log was recreated."""
        self._is_renewed = is_renewed
        self._copy, self.is_deserted, self.is_untouched = LogCopy(), is_renewed, is_renewed
        self._farthest = self.num_events
        self._is_restarting = self.num_events > 0 or self.has_started
        self.reader, self.num_accepted, self.lost_runs = self._new_reader(), 0, []

    def cut_off(self) -> None:
        """Record that the connection to the broker was lost."""
        if self.reader.ticket is not None:
            self._cut_off.add(self.reader.ticket)

    def read(self, event: ReplyEvent) -> Sequence[Action | Restarted]:
        """Process the next event of the log; returns the resulting actions in order.

        `Restarted` comes with the first event that a further reading passes on. Raises
        `StreamNotFound` if this reader has no right to the log.
        """
        actions = self._restore(event) if self.is_waiting else self._process(event)
        if actions and self.reader.is_ended:
            self.end = LogEnd.FAILED if isinstance(event, Failed) else LogEnd.FINISHED
        if self._is_restarting and any(isinstance(action, Relay) for action in actions):
            self._is_restarting = False
            return [Restarted(), *actions]
        return actions

    def _process(self, event: ReplyEvent) -> Sequence[Action]:
        """Process an event of a log whose events count."""
        match event:
            case TokenDelta() | Finished() | PromptScores():
                actions = self.reader.read(event)
                if len(actions) > 1:  # the event may have made a hedge the log's writer
                    self._note_starts(actions)
                if actions:
                    self._keep(event)
                return actions
            case Started() if not self.reader.is_foreign(event):
                self._learn(event)
                actions = self.reader.read(event)
                self._follow_run(event)
                self._note_starts(actions)
                self._keep_step(event)
                return actions
            case Accepted():
                self._learn(event)
                actions = self.reader.read(event)
                self._keep_step(event)
                return actions
            case HandedOver():
                actions = self.reader.read(event)
                self._follow_run(event)
                self._keep_step(event)
                return actions
            case _:
                return self.reader.read(event)

    def _restore(self, event: ReplyEvent) -> Sequence[Action]:
        """Process an event of a recreated log in which nothing counts before the copy."""
        kept = event.events if isinstance(event, Restored) else ()
        for earlier in kept:
            if isinstance(earlier, Accepted | Started):
                self._learn(earlier)
        actions = self.reader.read(event)
        for earlier in kept:
            self._keep(earlier)
        return actions

    def _note_starts(self, actions: Sequence[Action]) -> None:
        """Note the runs that have become the log's writer. A hedge does so with its first
        tokens."""
        for action in actions:
            if isinstance(action, Relay) and isinstance(action.event, Started):
                self.lost_runs.append(self.reader.num_lost_runs)
                self.on_start()

    def _follow_run(self, event: Started | HandedOver) -> None:
        self.is_untouched = False
        if event.ticket == self.reader.ticket:
            # The worker that has the job next may have been answered by the old queue of the log.
            self.is_deserted = self._is_renewed and isinstance(event, HandedOver)

    def cancel(self) -> list[Send]:
        """The commands that stop the job.

        There are none if no worker has started the job. The worker that takes it finds that its
        first event is `Unroutable`, once the log is deleted, or that the log is of another
        execution, and drops the job.
        """
        return self.reader.cancel()

    def _keep_step(self, event: Accepted | Started | HandedOver) -> None:
        if not self.reader.is_ended:  # a copy is followed by the log's `Failed`
            self._keep(event)

    def _keep(self, event: Kept) -> None:
        self._copy.keep(event)
        if self._copy.num_kept > self._best_copy.num_kept:
            self._best_copy = self._copy

    def _learn(self, event: Accepted | Started) -> None:
        if isinstance(event, Accepted):
            self.num_accepted += is_acceptance(event)
        else:
            self.has_started = True
            self.publication = max(self.publication, event.publication)
        if self.facts is None and (event.context or isinstance(event, Started)):
            self.facts = self._checked(event.context)
            self.reader = self._new_reader()

    def _checked(self, encoded: bytes) -> LogFacts:
        try:
            facts = decode_facts(encoded)
        except msgspec.MsgspecError:  # another program's job
            raise StreamNotFound(NOT_FOUND) from None
        if self.claim.tenant not in (None, facts.tenant):
            raise StreamNotFound(NOT_FOUND)
        return facts

    def _new_reader(self) -> LogReader:
        num_choices = self.facts.num_choices if self.facts is not None else 1
        return LogReader(
            self.claim.request_id, num_choices, self._cut_off, is_renewed=self._is_renewed
        )
