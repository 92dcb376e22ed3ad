"""The log lines about single requests and jobs: one line for each step of a life, with the same
fields everywhere.

A gateway writes about requests, a worker about jobs; ``request_id`` and ``trace_id`` connect them.
No line contains a prompt or an answer. `shared.telemetry.configure` sets the level of these lines
from ``WARREN_JOB_LOG_LEVEL``.
"""

import logging
from collections.abc import Mapping
from typing import Literal, TypeAlias

from shared.messages import GenerationJob, QuickJob

LOGGER = "warren.jobs"
"""The name of the logger, which has a level of its own."""

Step: TypeAlias = Literal[
    "request accepted",
    "request taken over",
    "request ended",
    "request refused",
    "stream resumed",
    "job started",
    "job taken over",
    "job handed over",
    "job moved",
    "job adopted",
    "job ended",
    "job refused",
    "job dead-lettered",
]

_logger = logging.getLogger(LOGGER)
_OFF = logging.CRITICAL + 1
_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "off": _OFF}


def set_level(name: str, least: str = "info") -> None:
    """Write only lines from the level ``name`` on, info, warning or off, and from the level
    ``least`` of all logs."""
    _logger.setLevel(max(_LEVELS[name], logging.getLevelNamesMapping()[least.upper()]))


def write(
    step: Step,
    job: GenerationJob | QuickJob | None,
    facts: Mapping[str, object],
    *,
    is_warning: bool = False,
) -> None:
    """Write the line of one step. ``facts`` follow the fields of the job; those that are None are
    left out."""
    level = logging.WARNING if is_warning else logging.INFO
    if not _logger.isEnabledFor(level):
        return
    fields = {} if job is None else _fields_of(job)
    fields.update((name, fact) for name, fact in facts.items() if fact is not None)
    # `Logger.log` would look for the caller in the stack, which takes a third of a line's time.
    record = logging.LogRecord(LOGGER, level, __file__, 0, step, (), None)
    vars(record).update(fields)
    _logger.handle(record)


def trace_id_of(trace: Mapping[str, str]) -> str | None:
    """The id of a W3C trace context, as 32 hexadecimal digits."""
    parts = trace.get("traceparent", "").split("-")
    return parts[1] if len(parts) > 2 else None


def _fields_of(job: GenerationJob | QuickJob) -> dict[str, object]:
    fields: dict[str, object] = {"request_id": job.request_id, "model": job.model}
    if job.tenant:
        fields["tenant"] = job.tenant
    if trace_id := trace_id_of(job.trace):
        fields["trace_id"] = trace_id
    return fields
