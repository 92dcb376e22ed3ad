"""Logs and traces, the same in every process.

Modules log through ``logging.getLogger(__name__)`` with ``extra={"request_id": ...}``; prompts and
answers never go into a log line. A span's context travels inside the job (`inject`, `extract`), so
that gateway, queue, prefill and decode are one trace whatever carried the message.
"""

import logging
import sys
from collections.abc import Mapping

import structlog
from opentelemetry import propagate, trace
from opentelemetry.context import Context, get_current
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from shared.settings import CommonSettings

tracer = trace.get_tracer("warren")

_TRACE_PARENT = "traceparent"
"""Where the W3C's trace context begins."""

_QUIET = ("aio_pika", "aiormq", "uvicorn.access", "httpx", "httpcore")


def configure(settings: CommonSettings, service: str) -> None:
    """Set up logging and, with an endpoint, the export of spans. Called once in a process."""
    _configure_logging(settings)
    if settings.otlp_endpoint is not None:
        _configure_tracing(settings.otlp_endpoint, service)


def inject() -> dict[str, str]:
    """The current trace context, for a message."""
    carrier: dict[str, str] = {}
    # Most processes export no spans: the propagators would do much to say nothing.
    if trace.get_current_span().get_span_context().is_valid:
        propagate.inject(carrier)
    return carrier


def extract(carrier: Mapping[str, str]) -> Context:
    """The trace context that `inject` put into a message; without one, the current context."""
    context = get_current()
    return propagate.extract(carrier, context) if _TRACE_PARENT in carrier else context


def _configure_logging(settings: CommonSettings) -> None:
    as_console = settings.log_format == "console" or (
        settings.log_format == "auto" and sys.stderr.isatty()
    )
    renderer = (
        structlog.dev.ConsoleRenderer() if as_console else structlog.processors.JSONRenderer()
    )
    handler = logging.StreamHandler()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[
                structlog.stdlib.add_log_level,
                structlog.stdlib.add_logger_name,
                structlog.stdlib.ExtraAdder(),
                structlog.processors.TimeStamper(fmt="iso"),
            ],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                renderer,
            ],
        )
    )
    logging.basicConfig(handlers=[handler], level=settings.log_level.upper(), force=True)
    for name in _QUIET:
        # These print message bodies, which hold prompts, at DEBUG and even at ERROR.
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _configure_tracing(endpoint: str, service: str) -> None:
    # Imported here: the exporter costs 0.2 s, and most processes export nothing.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
