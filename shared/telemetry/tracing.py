"""Spans, and the trace context that a job carries.

The spans of gateway, queue, prefill and decode form one trace on any bus.
"""

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import propagate, trace
from opentelemetry.context import Context, get_current
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, SpanKind, TraceFlags

tracer = trace.get_tracer("warren")

_TRACE_PARENT = "traceparent"
"""The key of W3C trace context that identifies the parent span."""


@contextmanager
def request_span(
    name: str,
    kind: SpanKind,
    facts: Mapping[str, str | int],
    carrier: Mapping[str, str],
    *,
    is_exported: bool = True,
) -> Iterator[Span]:
    """The span of a request, which is current in this context; its parent is that of ``carrier``,
    if it has one.

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


def _new_context() -> SpanContext:
    """The context of a new trace, which workers with an exporter sample."""
    trace_id, span_id = secrets.randbits(128), secrets.randbits(64)
    return SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(1))
