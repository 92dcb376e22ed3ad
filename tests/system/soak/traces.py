"""What the processes say of themselves: their logs, and the incidents that they count."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.support.processes import NO_TLS, WarrenProcess

ALLOWED_WARNINGS: Mapping[str, str] = {}
"""Warnings that the traffic asks for, with the reason of each."""
_INCIDENTS = "warren:incidents_total"
_MAX_ERROR_CHARS = 4000


@dataclass
class LoggedLines:
    """What one process logged at warning level and above."""

    errors: list[str] = field(default_factory=list)
    """Of the level error and above, and whatever is no log line, such as a bare traceback."""
    warnings: Counter[str] = field(default_factory=Counter)

    @property
    def unexpected(self) -> list[str]:
        """Warnings that nobody asked for."""
        return [
            f"{num} times {event!r}"
            for event, num in self.warnings.items()
            if event not in ALLOWED_WARNINGS
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
        elif entry["level"] in ("error", "critical"):
            lines.errors.append(line[:_MAX_ERROR_CHARS])
    if bare:
        lines.errors.append("\n".join(bare)[:_MAX_ERROR_CHARS])
    return lines


def metric(process: WarrenProcess, name: str) -> float:
    """The sum of one metric over its labels."""
    lines = httpx.get(f"{process.url}/metrics", verify=NO_TLS).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.split("{")[0].split()[0] == name)


def num_incidents(process: WarrenProcess) -> int:
    return round(metric(process, _INCIDENTS))


def _entry(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError:
        return None
    return entry if isinstance(entry, dict) and {"level", "event"} <= entry.keys() else None
