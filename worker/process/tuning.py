"""`WorkerTuning`: the times and sizes of a worker that operators do not choose."""

from dataclasses import dataclass

from shared.topology import ANNOUNCE_INTERVAL_S

_MIN_READER_GRACE_S = 10.0
_READER_MARGIN_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTuning:
    """Times are in seconds. A service has the defaults, and tests choose others."""

    announce_interval_s: float = ANNOUNCE_INTERVAL_S
    """The pause between two announcements of this worker."""
    reader_grace_s: float | None = None
    """The time until a stream that has no reader is cancelled, unless it is detached. None: long
    enough for the clients that gateways wait for."""
    batch_patience_s: float = 60.0
    """The time without a token until a batch job is promoted to interactive priority, one job at a
    time, so that no job starves."""
    stream_events_per_s: float = 10.0
    """The most events per second of an interactive stream, after its first ten tokens: an event
    costs worker, broker and gateway about as much with one token as with ten."""
    notice_interval_s: float = 5.0
    """The pause between two looks for a notice that the machine ends, as AWS recommends."""
    max_waiting_jobs: int = 256
    """The number of jobs of each class that the worker takes from its queue beyond those that it
    can run, in order to serve their tenants in turn."""

    def wait_for_reader_s(self, disconnect_grace_s: float) -> float:
        """Gateways wait ``disconnect_grace_s`` for a client, and their next look takes a while."""
        if self.reader_grace_s is not None:
            return self.reader_grace_s
        return max(_MIN_READER_GRACE_S, disconnect_grace_s + _READER_MARGIN_S)


WORKER_TUNING = WorkerTuning()
