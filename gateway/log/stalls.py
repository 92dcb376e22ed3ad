"""Detects streams whose worker has stalled."""

import time
from collections.abc import Iterable

from gateway.fleet.live_workers import LiveWorkers
from gateway.log.cursor import LogEnd
from gateway.log.relay import LogRelay

LOOK_INTERVAL_S = 0.5
_MAX_LATE_S = 0.5
_DESERTED_S = 1.5
"""Seconds. A worker that has an event to publish looks for its log within a second. An extra job is
cheaper than a longer pause of the stream."""
STRANDED_S = 30.0
"""Seconds that a resumed stream waits for its recreated log to get its copy, and for a worker to
write to it."""
_MAX_AT_ONCE = 32
"""Maximum number of streams moved at once, so as not to overload a slow machine or broker
further."""


class StallWatch:
    """Inspects relays periodically; streams have no overhead in between."""

    def __init__(self, workers: LiveWorkers, silence_s: float) -> None:
        """A worker without a heartbeat for ``silence_s`` is considered lost."""
        self._workers = workers
        self._silence_s = silence_s
        self._seen: dict[str, tuple[object, float]] = {}
        """The progress of each log, and the time of its last change."""
        self._deserted: set[str] = set()
        """Recreated logs whose jobs were moved because no run had continued in them."""
        self._looked_at = time.monotonic()

    def look(self, relays: Iterable[LogRelay], is_connected: bool) -> list[LogRelay]:
        """The relays whose logs and workers have been silent too long, each at most once per
        period, and once in all if no worker has begun to write to its recreated log.

        While the broker is unreachable all are silent but none has stopped. If this process itself
        is late, their messages may not have been read yet.
        """
        now = time.monotonic()
        can_hear = is_connected and now - self._looked_at < LOOK_INTERVAL_S + _MAX_LATE_S
        self._looked_at = now
        seen: dict[str, tuple[object, float]] = {}
        stalled: list[LogRelay] = []
        relays = list(relays)
        self._deserted &= {relay.log_name for relay in relays}
        for relay in relays:
            progress = relay.progress
            before, since = self._seen.get(relay.request_id, (None, now))
            if progress is None or progress != before or not can_hear:
                since = now
            elif len(stalled) < _MAX_AT_ONCE and self._is_stalled(relay, since, now):
                stalled.append(relay)
                since = now
                if relay.cursor.is_deserted:
                    self._deserted.add(relay.log_name)
            seen[relay.request_id] = progress, since
        self._seen = seen
        return stalled

    def retry(self, relay: LogRelay) -> None:
        """Name a relay again later, because its job could not be moved."""
        self._deserted.discard(relay.log_name)

    @staticmethod
    def is_stranded(relay: LogRelay) -> bool:
        """Whether a resumed stream has a recreated log without its copy, or whose job has begun and
        to which no run has written."""
        cursor = relay.cursor
        if relay.job is not None or cursor.end is not LogEnd.OPEN:
            return False
        return cursor.is_waiting or (cursor.has_started and cursor.is_untouched)

    def _is_stalled(self, relay: LogRelay, since: float, now: float) -> bool:
        if relay.cursor.end is not LogEnd.OPEN:
            return False
        if relay.job is None:
            # The job of a resumed stream is known only to the broker. It is redelivered all the
            # same: a worker that hangs exits, and a worker that was stopped or disconnected loses
            # its connection. If no run writes to a recreated log, the job may have ended. A log
            # without its copy was left by a gateway that died when it had just recreated it.
            return self.is_stranded(relay) and now - since >= STRANDED_S
        if relay.cursor.is_deserted:
            # The worker had written the rest of the answer, or nobody knows it: its first event was
            # lost with the log's node. A single extra job is enough, however long it waits in its
            # queue.
            return relay.log_name not in self._deserted and now - since >= _DESERTED_S
        if relay.worker is None:
            return False
        heard_at = max(since, self._workers.heard_at(relay.worker))
        return now - heard_at >= self._silence_s
