"""What happens to a job and its log when a reader leaves the log."""

from enum import Enum, auto

from shared.errors import (
    IdempotencyMismatch,
    StreamExpired,
    StreamNotFound,
    TakenOver,
    Unavailable,
    WarrenError,
)


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
    """The gateway shuts down; the client was asked to return to another one."""
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
    """What happens to a job and its log."""

    STAYS = auto()
    """Both continue without this reader; the log expires."""
    WAITS = auto()
    """Both continue for the grace period, and end unless the client returns."""
    ENDS = auto()
    """The job is cancelled and the log deleted."""


_DISPLACING = (TakenOver, StreamNotFound, StreamExpired, IdempotencyMismatch)
_KNOWS_ID = (Departure.SERVED, Departure.LEFT)


def departure_of(said: Departure, error: WarrenError | None, *, is_ours: bool) -> Departure:
    """Why a reader leaves that has ``said`` so, and whose reading ended with ``error``.

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
