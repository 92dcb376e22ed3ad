"""Failures that the process survives: each leaves one log line and moves one counter.

An incident is an error that nobody asked for: a bug in the handling of one job or request, or a
channel or connection that ended. What it hit is retried, given back or answered with an error; the
process goes on. Gateways and workers expose the counter with their own metrics.
"""

import logging
from typing import Literal, TypeAlias

from prometheus_client import CollectorRegistry, Counter

Kind: TypeAlias = Literal["job", "request", "task", "call", "channel", "connection"]
"""What failed: one job, one HTTP request, one background task, one call to the broker, or what
carried it."""

REGISTRY = CollectorRegistry()
"""The counter's registry, one for the process: both sides of `warren serve` share it."""

_incidents = Counter(
    "warren:incidents",
    "Failures that the process survived, by what failed.",
    ["kind"],
    registry=REGISTRY,
)

logger = logging.getLogger(__name__)


def report(kind: Kind, event: str, error: BaseException | None, **facts: object) -> None:
    """Log ``error`` with its traceback as ``event``, with ``facts`` as fields, and count it."""
    _incidents.labels(kind).inc()
    logger.error(event, exc_info=error, extra={"incident": kind, **facts})


def num_reported(kind: Kind) -> int:
    """How many incidents of this kind the process has had."""
    return int(REGISTRY.get_sample_value("warren:incidents_total", {"kind": kind}) or 0)
