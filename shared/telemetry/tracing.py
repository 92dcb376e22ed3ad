"""Spans, and the trace context that a job carries.

The spans of gateway, queue, prefill and decode form one trace on any bus.
"""

from collections.abc import Mapping

from opentelemetry import propagate, trace
from opentelemetry.context import Context, get_current

tracer = trace.get_tracer("warren")

_TRACE_PARENT = "traceparent"
"""The key of W3C trace context that identifies the parent span."""


def inject() -> dict[str, str]:
    """The current trace context, for inclusion in a message."""
    carrier: dict[str, str] = {}
    # Most processes export no spans; skip the cost of the propagators.
    if trace.get_current_span().get_span_context().is_valid:
        propagate.inject(carrier)
    return carrier


def extract(carrier: Mapping[str, str]) -> Context:
    """The trace context that `inject` put into a message; if there is none, the current context."""
    context = get_current()
    return propagate.extract(carrier, context) if _TRACE_PARENT in carrier else context
