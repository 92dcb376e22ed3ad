"""Reports that a store, which is the database or the storage of files, fails, and works again."""

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

_REMIND_S = 60.0


class StoreOutage:
    """The outages of a store. A failure begins an outage, if the store is up.

    On a full disk reading works, and so does a transaction that changes nothing. Success in reading
    therefore does not end an outage of writing, and no outage ends within ``settle_s`` after a
    failure.
    """

    def __init__(
        self, store: str, settle_s: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``store`` is its name in log lines; ``clock`` returns the time in seconds."""
        self._store = store
        self._settle_s = settle_s
        self._clock = clock
        self._since: float | None = None
        self._failed_at = 0.0
        self._said_at = 0.0
        self._is_of_writes = False

    def is_up(self) -> bool:
        """Whether there is no outage."""
        return self._since is None

    def failed(self, reason: str, *, is_writing: bool = True) -> None:
        """Report a failure. The first failure of an outage is logged, and then a failure each
        minute."""
        now = self._failed_at = self._clock()
        self._is_of_writes = is_writing or (self._is_of_writes and not self.is_up())
        facts = {"reason": reason}
        if self._since is None:
            self._since = self._said_at = now
            logger.error("%s unavailable", self._store, extra=facts)
        elif now - self._said_at >= _REMIND_S:
            self._said_at = now
            lost_s = round(now - self._since, 1)
            logger.error("%s still unavailable", self._store, extra={**facts, "lost_s": lost_s})

    def worked(self, *, is_writing: bool = True) -> None:
        """Report that the store has done its work."""
        if self._since is None or (self._is_of_writes and not is_writing):
            return
        now = self._clock()
        if now - self._failed_at >= self._settle_s:
            lost_s = round(now - self._since, 1)
            logger.info("%s available again", self._store, extra={"lost_s": lost_s})
            self._since = None
