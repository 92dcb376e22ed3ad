"""Reports that a connection to the broker is lost, still lost, and open again."""

import logging
import time
from collections.abc import Callable, Mapping

from shared.telemetry import incidents, metrics

logger = logging.getLogger(__name__)

_REMIND_S = 10.0


class Outage:
    """The outages of a connection, each of which begins with `lost` or `failed`."""

    def __init__(
        self, fields: Mapping[str, object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Each line has ``fields``; ``clock`` returns the time in seconds."""
        self._fields = fields
        self._clock = clock
        self._since: float | None = None
        self._said_at = 0.0
        self._problem = ""

    def lost(self, error: BaseException | None) -> None:
        """Report that an open connection was lost."""
        self._begin("broker connection lost")
        incidents.report("connection", self._problem, error, **self._fields)

    def failed(self, problem: str, error: BaseException) -> None:
        """Report that an attempt to connect failed: each ``problem`` once, then every 10 s."""
        is_known = self._since is not None and problem == self._problem
        facts = {**self._fields, "reason": f"{type(error).__name__}: {error}"}
        if not is_known:
            self._begin(problem)
            logger.warning(problem, extra=facts)
        elif self._clock() - self._said_at >= _REMIND_S:
            self._said_at = self._clock()
            logger.warning("broker still unreachable", extra={**facts, "lost_s": self._lost_s})
        else:
            logger.debug(problem, extra=facts)

    def ended(self) -> None:
        """Report that the connection is open. The first connection ends no outage."""
        if self._since is not None:
            logger.info("broker connected again", extra={**self._fields, "lost_s": self._lost_s})
            metrics.reconnects.inc()
        self._since, self._problem = None, ""

    @property
    def _lost_s(self) -> float:
        return round(self._clock() - (self._since or 0.0), 1)

    def _begin(self, problem: str) -> None:
        self._problem, self._said_at = problem, self._clock()
        if self._since is None:
            self._since = self._said_at
