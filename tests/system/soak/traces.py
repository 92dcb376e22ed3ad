"""The traces of the processes: their logs, and their incident counters."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.support.deployment.processes import WarrenProcess
from tests.support.metrics import sample

ALLOWED_WARNINGS: Mapping[str, str] = {}
"""Warnings that the traffic is expected to cause, with the reason for each."""
ALLOWED_REFUSALS: Mapping[str, str] = {
    "queue.declare: not_found": "a gateway or worker asks whether a log is there",
    "basic.consume: not_found": "a log was deleted before its reader attached",
    "queue.bind: not_found": "a log was deleted while it was declared, which is done again",
    "basic.consume: access_refused": "a log has another reader still",
}
"""Errors of a channel that Warren takes for an answer, with the reason of each."""
PROVOKED_WARNINGS: Mapping[str, str] = {
    "broker unreachable": "a new connection was struck, too",
    "broker still unreachable": "a new connection was struck again and again",
    "job taken over": "a lost connection moved it",
    "request taken over": "a lost connection moved its job",
    "job moved": "lost connections alone brought a job back too often",
    "job not moved": "the connection was lost again at that moment",
    "subscription failed, retrying": "its channel or connection was struck",
    "reply queue lost, retrying": "its channel or connection was struck",
    "request failed by the broker": "answered with 503, and sent again",
}
"""Warnings that provoked faults ask for, with the reason of each."""
PROVOKED_INCIDENTS = {"channel", "connection"}
"""What provoked faults end, and nothing else."""
_REFUSAL = re.compile(r"operation (\S+) caused a channel exception (\w+)")
_REFUSED = "Channel error on connection"
_INCIDENTS = "warren_incidents_total"
_MAX_ERROR_CHARS = 4000


@dataclass(frozen=True)
class Incident:
    """A line about a failure that the process survived."""

    kind: str
    line: str


@dataclass
class LoggedLines:
    """The log lines of a process at warning level and above."""

    errors: list[str] = field(default_factory=list)
    """Of the level error and above, and whatever is no log line, such as a bare traceback."""
    incidents: list[Incident] = field(default_factory=list)
    """See `shared.telemetry.incidents`; they are not among the errors."""
    warnings: Counter[str] = field(default_factory=Counter)

    def unexpected(self, *, is_provoked: bool = False) -> list[str]:
        """Warnings that neither the traffic nor provoked faults ask for."""
        return [
            f"{num} times {event!r}"
            for event, num in self.warnings.items()
            if not reason_of(event, is_provoked=is_provoked)
        ]


def logged(log: str) -> LoggedLines:
    """Read a process's log."""
    lines = LoggedLines()
    bare: list[str] = []
    for line in log.splitlines():
        entry = _entry(line)
        if entry is None:
            bare.append(line)
        elif entry["level"] == "warning":
            lines.warnings[entry["event"]] += 1
        elif "incident" in entry:
            lines.incidents.append(Incident(entry["incident"], line[:_MAX_ERROR_CHARS]))
        elif entry["level"] in ("error", "critical"):
            lines.errors.append(line[:_MAX_ERROR_CHARS])
    if bare:
        lines.errors.append("\n".join(bare)[:_MAX_ERROR_CHARS])
    return lines


def logged_by_broker(log: str) -> LoggedLines:
    """Read the broker's log, in which each channel error counts as a warning."""
    lines = LoggedLines()
    for line in log.splitlines():
        if refusal := _REFUSAL.search(line):
            lines.warnings[f"{refusal[1]}: {refusal[2]}"] += 1
        elif "[error]" in line and _REFUSED not in line:
            lines.errors.append(line)
    return lines


def reason_of(event: str, *, is_provoked: bool = False) -> str:
    """Why a warning is expected; empty if it is not."""
    provoked = PROVOKED_WARNINGS if is_provoked else {}
    return {**ALLOWED_WARNINGS, **ALLOWED_REFUSALS, **provoked}.get(event, "")


def num_incidents(process: WarrenProcess) -> int:
    return round(sample(process, _INCIDENTS))


def _entry(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError:
        return None
    return entry if isinstance(entry, dict) and {"level", "event"} <= entry.keys() else None
