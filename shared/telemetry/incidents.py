"""Unexpected failures that the process survives: each failure is logged and counted.

An incident is a bug in the handling of a job or request, or a channel or connection that was lost.
The affected work is retried, requeued or answered with an error, and the process continues.
Gateways and workers expose the counter with their own metrics.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias, get_args

from shared.backoff import Backoff
from shared.telemetry import floods
from shared.telemetry.metrics import PROCESS

IncidentKind: TypeAlias = Literal[
    "job", "request", "task", "call", "channel", "connection", "audit"
]
"""What failed: a job, an HTTP request, a background task, a call to the broker, a channel, a
connection, or the audit of an answer, if workers disagree about it."""

_incidents = PROCESS.counter(
    "warren_incidents_total",
    "Failures that the process survived, by what failed: job, request, task, call, channel, "
    "connection, or audit, if workers disagree about an answer.",
    "kind",
    begin=get_args(IncidentKind),
)

logger = logging.getLogger(__name__)

_OF_BROKER: tuple[IncidentKind, ...] = ("channel", "connection")
_CLIENTS = ("aiormq.exceptions", "aio_pika.exceptions")
"""The modules with the errors by which the broker's client reports a loss."""
_MIN_RESTART_PAUSE_S = 0.2
_MAX_RESTART_PAUSE_S = 5.0


def report(kind: IncidentKind, event: str, error: BaseException | None, **facts: object) -> None:
    """Log ``error`` with its traceback as ``event``, with ``facts`` as fields, and count it.

    A client may know how to cause it, so `floods` limits the lines of each event.
    """
    _incidents.labels(kind).inc()
    if floods.allows("incident", event):
        logger.error(event, exc_info=error, extra={"incident": kind, **facts})


def shorten_loss(record: logging.LogRecord) -> bool:
    """A filter that replaces the traceback of a lost connection or channel with the reason: where
    the process noticed that the broker is gone says nothing. Other tracebacks stay."""
    error = record.exc_info[1] if record.exc_info else None
    is_of_broker = getattr(record, "incident", "") in _OF_BROKER
    if is_of_broker and (isinstance(error, OSError) or type(error).__module__ in _CLIENTS):
        record.reason = f"{type(error).__name__}: {error}"
        record.exc_info = None
    return True


def num_reported(kind: IncidentKind) -> int:
    """The number of incidents of this kind in this process."""
    return int(PROCESS.registry.get_sample_value("warren_incidents_total", {"kind": kind}) or 0)


@contextmanager
def survived(kind: IncidentKind, event: str, **facts: object) -> Iterator[None]:
    """Report an error of the ``with`` block and suppress it. Cancellation is not suppressed."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 (any error is reported)
        report(kind, event, error, **facts)


async def keep_running(
    work: Callable[[], Awaitable[None]], event: str = "background task restarted"
) -> None:
    """Run ``work`` until it returns. Whenever it fails, report ``event`` and restart it, after a
    pause that doubles as long as it keeps failing."""
    backoff, pause_s = Backoff(_MIN_RESTART_PAUSE_S, _MAX_RESTART_PAUSE_S), 0.0
    while True:
        began_at = time.monotonic()
        try:
            if pause_s:
                await asyncio.sleep(pause_s)
                began_at = time.monotonic()
            return await work()
        except Exception as error:  # noqa: BLE001 (any error is reported)
            report("task", event, error, task=getattr(work, "__qualname__", repr(work)))
        backoff.lasted(time.monotonic() - began_at)
        pause_s = backoff.pause_s
