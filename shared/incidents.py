"""Failures that the process survives: each leaves one log line and moves one counter.

An incident is an error that nobody asked for: a bug in the handling of one job or request, or a
channel or connection that ended. What it hit is retried, given back or answered with an error; the
process goes on. Gateways and workers expose the counter with their own metrics.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
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

_RESTART_PAUSE_S = 0.2


def report(kind: Kind, event: str, error: BaseException | None, **facts: object) -> None:
    """Log ``error`` with its traceback as ``event``, with ``facts`` as fields, and count it."""
    _incidents.labels(kind).inc()
    logger.error(event, exc_info=error, extra={"incident": kind, **facts})


def num_reported(kind: Kind) -> int:
    """How many incidents of this kind the process has had."""
    return int(REGISTRY.get_sample_value("warren:incidents_total", {"kind": kind}) or 0)


@contextmanager
def survived(kind: Kind, event: str, **facts: object) -> Iterator[None]:
    """Report an error that leaves the ``with``, and go on behind it. A cancellation is no error."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 (whatever it is, it is reported)
        report(kind, event, error, **facts)


async def keep_running(
    work: Callable[[], Awaitable[None]], event: str = "background task restarted"
) -> None:
    """Run ``work`` until it returns. Whenever it fails, report ``event`` and start it again."""
    pause_s = 0.0
    while True:
        try:
            await asyncio.sleep(pause_s)
            return await work()
        except Exception as error:  # noqa: BLE001 (whatever it is, it is reported)
            report("task", event, error, task=getattr(work, "__qualname__", repr(work)))
            pause_s = _RESTART_PAUSE_S
