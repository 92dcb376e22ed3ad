"""How far the clocks of workers are ahead of this gateway's, from their announcements.

Deadlines are absolute times that gateways write and workers read. A worker whose clock is ahead
would answer each request as late, so a job's deadline is moved by the difference. The gateway ends
its requests itself by its own clock.
"""

import logging
import time
from collections.abc import Callable, Iterable

from shared.messages import Announcement

logger = logging.getLogger(__name__)

MAX_SKEW_S = 5.0
"""A larger difference is a problem. Announcements arrive late if a gateway or the broker is
busy."""
_MIN_SHIFT_S = 1.0
"""A smaller difference is not worth a shift."""


class WorkerClocks:
    """The clocks of live workers."""

    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        """``wall_clock`` returns the Unix time."""
        self._wall_clock = wall_clock
        self._ahead: dict[str, float] = {}
        self._fast: set[str] = set()
        """Workers for which deadlines are moved."""
        self._warned: set[str] = set()

    def hear(self, announcement: Announcement) -> None:
        """Compare a worker's clock, and warn once if it differs too much."""
        worker = announcement.worker
        if announcement.is_leaving or not announcement.sent_at:
            self._ahead.pop(worker, None)
            self._fast.discard(worker)
            self._warned.discard(worker)
            return
        ahead_s = announcement.sent_at - self._wall_clock()
        self._ahead[worker] = ahead_s
        (self._fast.add if ahead_s > _MIN_SHIFT_S else self._fast.discard)(worker)
        if abs(ahead_s) <= MAX_SKEW_S:
            self._warned.discard(worker)
        elif worker not in self._warned:
            self._warned.add(worker)
            facts = {"worker": worker, "model": announcement.model, "ahead_s": round(ahead_s, 1)}
            logger.warning("worker's clock differs", extra=facts)

    def forget_all_but(self, workers: Iterable[str]) -> None:
        """Forget workers that are gone."""
        live = set(workers)
        self._ahead = {worker: ahead for worker, ahead in self._ahead.items() if worker in live}
        self._fast &= live
        self._warned &= live

    def ahead_s(self, worker: str) -> float:
        """Seconds by which a worker's clock is ahead; 0 if it is not known."""
        return self._ahead.get(worker, 0.0)

    def shift_s(self, workers: Iterable[str]) -> float:
        """Seconds by which the deadline of a job is moved that any of these workers may take."""
        return max((self._ahead[worker] for worker in workers if worker in self._fast), default=0.0)

    @property
    def are_level(self) -> bool:
        """Whether no worker's clock is ahead."""
        return not self._fast
