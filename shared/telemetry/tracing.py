"""Spans, and the trace context that a job carries.

The spans of gateway, queue, prefill and decode form one trace on any bus.
"""

import secrets
from collections.abc import Mapping

from opentelemetry import propagate, trace
from opentelemetry.context import Context, get_current

tracer = trace.get_tracer("warren")

_TRACE_PARENT = "traceparent"
"""The key of W3C trace context that identifies the parent span."""


def inject() -> dict[str, str]:
    """The current trace context, for inclusion in a message; that of a new trace if there is none,
    so that the log lines of all processes have its id."""
    # Most processes export no spans; skip the cost of the propagators.
    if not trace.get_current_span().get_span_context().is_valid:
        return {_TRACE_PARENT: f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"}
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier


def extract(carrier: Mapping[str, str]) -> Context:
    """The trace context that `inject` put into a message; if there is none, the current context."""
    context = get_current()
    return propagate.extract(carrier, context) if _TRACE_PARENT in carrier else context
