"""Progress of long operations, for logs: a terminal shows it in another way."""

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

_INTERVAL_S = 5.0


class LoggedProgress:
    """A `worker.checkpoints.cache.Progress` that writes a line every few seconds, and whenever a
    stage begins or ends."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stage = ""
        self._logged_at = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        """``done`` of ``total``, in bytes or steps; a total of 0 is unknown."""
        is_edge = stage != self._stage or (done == total and total > 0)
        if not is_edge and self._clock() - self._logged_at < _INTERVAL_S:
            return
        self._stage, self._logged_at = stage, self._clock()
        logger.info("model progress", extra={"stage": stage, "done": done, "total": total})
