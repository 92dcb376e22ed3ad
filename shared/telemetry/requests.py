"""Log lines, spans and tenant labels of single requests and jobs.

There is a line for each step of a life, with the same fields everywhere. A gateway writes about
requests, a worker about jobs; ``request_id`` and ``trace_id`` connect them. No line contains a
prompt or an answer. `shared.telemetry.setup.configure` sets the level of these lines from
``WARREN_LOG_LEVEL``.

The spans of gateway, queue, prefill and decode form one trace on any bus.
"""

import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, TypeAlias

from opentelemetry import propagate, trace
from opentelemetry.context import Context, get_current
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, SpanKind, TraceFlags

from shared.messages import GenerationJob, QuickJob
from shared.telemetry import floods

LOGGER = "warren.jobs"
"""The name of the logger, which has a level of its own."""

Step: TypeAlias = Literal[
    "request accepted",
    "request taken over",
    "request ended",
    "request refused",
    "stream resumed",
    "fields ignored",
    "job started",
    "job taken over",
    "job handed over",
    "job moved",
    "job adopted",
    "job ended",
    "job refused",
    "job dead-lettered",
]

tracer = trace.get_tracer("warren")

ANONYMOUS, OTHER = "anonymous", "other"
"""The labels of requests without a tenant, and of the tenants that have no label."""
_REMEMBERED = 10_000
"""Requests after which the counts of tenants are halved, so that recent requests weigh more."""
_MAX_OTHERS = 16
_TRACE_PARENT = "traceparent"
"""The key of W3C trace context that identifies the parent span."""
_logger = logging.getLogger(LOGGER)
_LIMITED: Mapping[Step, floods.FloodEvent] = {
    "request refused": "request refused",
    "fields ignored": "fields ignored",
    "job refused": "job refused",
    "job dead-lettered": "job dead-lettered",
}
"""The steps that cost a client or publisher nothing, so that their lines are limited."""


def set_level(name: str) -> None:
    """Write only lines from the level ``name`` on."""
    _logger.setLevel(name.upper())


def write_line(
    step: Step,
    job: GenerationJob | QuickJob | None,
    facts: Mapping[str, object],
    *,
    is_warning: bool = False,
) -> None:
    """Write the line of a step. ``facts`` follow the fields of the job; facts that are None are
    left out. `floods` limits the lines about refused work, for each tenant, or for each user of the
    broker if there is no tenant."""
    level = logging.WARNING if is_warning else logging.INFO
    if not _logger.isEnabledFor(level):
        return
    fields = {} if job is None else _fields_of(job)
    fields.update((name, fact) for name, fact in facts.items() if fact is not None)
    limited = _LIMITED.get(step)
    party = fields.get("tenant") or fields.get("user") or ""
    if limited is not None and not floods.allows(limited, str(party)):
        return
    # `Logger.log` would look for the caller in the stack, which takes a third of a line's time.
    record = logging.LogRecord(LOGGER, level, __file__, 0, step, (), None)
    vars(record).update(fields)
    _logger.handle(record)


@contextmanager
def request_span(
    name: str,
    kind: SpanKind,
    facts: Mapping[str, str | int],
    carrier: Mapping[str, str],
    *,
    is_exported: bool = True,
) -> Iterator[Span]:
    """The span of a request, which is current in this context. Its parent is the span that
    ``carrier`` names, if it names a span.

    A span that is not exported has a trace context too, so that the log lines of all processes have
    the id of a trace.
    """
    parent = extract(carrier)
    if is_exported:
        span = tracer.start_span(name, parent, kind, facts)
    else:
        span = NonRecordingSpan(trace.get_current_span(parent).get_span_context())
    if not span.get_span_context().is_valid:  # most processes have no exporter
        span = NonRecordingSpan(_new_context())
    with trace.use_span(span, end_on_exit=True):
        yield span


def inject() -> dict[str, str]:
    """The current trace context, for inclusion in a message."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier


def extract(carrier: Mapping[str, str]) -> Context:
    """The trace context that `inject` put into a message; if there is none, the current context."""
    context = get_current()
    return propagate.extract(carrier, context) if _TRACE_PARENT in carrier else context


def trace_id_of(carrier: Mapping[str, str]) -> str | None:
    """The id of a W3C trace context, as 32 hexadecimal digits."""
    parts = carrier.get(_TRACE_PARENT, "").split("-")
    return parts[1] if len(parts) > 2 else None


class TenantLabels:
    """The label of each tenant: its name, if it is among the tenants with the most recent requests.

    Series cannot move between labels, so a tenant that is displaced loses its series, and its
    further requests are counted as `OTHER`.
    """

    def __init__(self, size: int, forget: Callable[[str], object]) -> None:
        """``forget`` is called with each displaced tenant."""
        self._size = size
        self._forget = forget
        self._counts: Counter[str] = Counter()
        self._others: Counter[str] = Counter()

    def label(self, tenant: str) -> str:
        """Count a request of ``tenant``; returns the label of its metrics."""
        if not tenant:
            return ANONYMOUS
        if tenant in self._counts or len(self._counts) < self._size:
            self._counts[tenant] += 1
            if self._counts[tenant] >= _REMEMBERED:
                self._halve()
            return tenant
        if not self._size:
            return OTHER
        self._others[tenant] += 1
        smallest = min(self._counts, key=self._counts.__getitem__)
        if self._others[tenant] > self._counts[smallest]:
            del self._counts[smallest]
            self._counts[tenant] = self._others.pop(tenant)
            self._forget(smallest)
            return tenant
        if len(self._others) > _MAX_OTHERS * self._size:
            self._others.clear()
        return OTHER

    def _halve(self) -> None:
        for counts in (self._counts, self._others):
            for tenant in counts:
                counts[tenant] //= 2


def _new_context() -> SpanContext:
    """The context of a new trace, which workers with an exporter sample."""
    trace_id, span_id = secrets.randbits(128), secrets.randbits(64)
    return SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(1))


def _fields_of(job: GenerationJob | QuickJob) -> dict[str, object]:
    fields: dict[str, object] = {"request_id": job.request_id, "model": job.model}
    if job.tenant:
        fields["tenant"] = job.tenant
    if trace_id := trace_id_of(job.trace):
        fields["trace_id"] = trace_id
    return fields
