"""Limits on the log lines that strangers can cause, so that a flood does not fill the disk.

Such a line is written only if `allows` permits it. Each party has a budget for each event. A party
is a tenant, an API key or a user of the broker; all clients that are not known share the party
without a name. So nobody can hide the lines about another party. Lines that are left out are
counted, and a line at the end of the window says how many they were.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias, get_args

from shared.telemetry.metrics import PROCESS

FloodEvent: TypeAlias = Literal[
    "access refused",
    "broker error",
    "command dropped",
    "constraint rejected",
    "fields ignored",
    "health request failed",
    "incident",
    "job dead-lettered",
    "job refused",
    "library",
    "limits not checked",
    "login refused",
    "message dropped",
    "request refused",
    "response not stored",
]
"""What a line is about; the label of the metric."""

WINDOW_S = 10.0
MAX_LINES = 30
"""Lines of a party about an event in a window. A line has about 400 bytes, so that all strangers
together cause at most 100 MB a day for each event."""
_MAX_PARTIES = 1000
"""Parties that have a budget of their own in a window; all others share a budget."""
_MAX_LISTED = 5
_OTHERS = "others"

_left_out = PROCESS.counter(
    "warren_log_lines_left_out_total",
    "Log lines that clients or publishers caused and that were left out because there were too "
    "many about the same event.",
    "event",
    begin=get_args(FloodEvent),
)

logger = logging.getLogger(__name__)

Summarise: TypeAlias = Callable[[FloodEvent, Mapping[str, int]], None]
"""Writes how many lines about an event were left out, by party."""


class Limiter:
    """The budgets of all events and parties. It may be used from any thread."""

    def __init__(
        self,
        summarise: Summarise,
        *,
        clock: Callable[[], float] = time.monotonic,
        later: Callable[[float, Callable[[], None]], None] | None = None,
    ) -> None:
        """``clock`` returns the time in seconds; ``later`` calls a function after a time."""
        self._summarise = summarise
        self._clock = clock
        self._later = _in_thread if later is None else later
        self._lock = threading.Lock()
        self._windows: dict[FloodEvent, _Window] = {}

    def allows(self, event: FloodEvent, party: str = "") -> bool:
        """Whether a line about ``event`` that ``party`` has caused may be written. If not, the line
        is counted."""
        with self._lock:
            now = self._clock()
            window = self._windows.get(event)
            if window is None or now >= window.ends_at:
                window = self._windows[event] = _Window(now + WINDOW_S)
            if window.allows(party):
                return True
            is_first = window.left_out.total() == 1
        _left_out.labels(event).inc()
        if is_first:
            self._later(window.ends_at - now, lambda: self._end(event, window))
        return False

    def _end(self, event: FloodEvent, window: "_Window") -> None:
        with self._lock:
            window.ends_at = 0.0  # timers may be early, and what follows has a window of its own
            left_out = dict(window.left_out)
        self._summarise(event, left_out)


class _Window:
    def __init__(self, ends_at: float) -> None:
        self.ends_at = ends_at
        self._written: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()

    def allows(self, party: str) -> bool:
        if party not in self._written and len(self._written) >= _MAX_PARTIES:
            party = _OTHERS
        if self._written[party] < MAX_LINES:
            self._written[party] += 1
            return True
        self.left_out[party] += 1
        return False


class LibraryFilter(logging.Filter):
    """Limits the lines of a library that clients can cause, such as asyncio's about connections.
    Each message has a budget of its own."""

    def filter(self, record: logging.LogRecord) -> bool:
        return allows("library", f"{record.name}: {record.msg}")


def allows(event: FloodEvent, party: str = "") -> bool:
    """Whether this process may write a line about ``event`` that ``party`` has caused."""
    return LINES.allows(event, party)


def warn(
    to: logging.Logger,
    message: str,
    event: FloodEvent,
    facts: Mapping[str, object],
    party: str = "",
) -> None:
    """Log a warning that ``party`` has caused, with ``facts`` as fields, if `allows` permits it."""
    if allows(event, party):
        to.warning(message, extra=facts)


def write_summary(event: FloodEvent, left_out: Mapping[str, int]) -> None:
    listed = sorted(left_out, key=left_out.__getitem__, reverse=True)[:_MAX_LISTED]
    logger.warning(
        "log lines left out",
        extra={
            "about": event,
            "num_left_out": sum(left_out.values()),
            "of": {party or "anonymous": left_out[party] for party in listed},
        },
    )


def _in_thread(delay_s: float, call: Callable[[], None]) -> None:
    timer = threading.Timer(delay_s, call)
    timer.name, timer.daemon = "log summary", True
    timer.start()


LINES = Limiter(write_summary)
"""The budgets of this process."""
