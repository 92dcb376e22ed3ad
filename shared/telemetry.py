"""Logging and tracing, configured alike in every process.

Modules log through ``logging.getLogger(__name__)`` with ``extra={"request_id": ...}``. Prompts and
answers are never logged. A span's context is part of the job (`inject`, `extract`), so the spans of
gateway, queue, prefill and decode form one trace on any bus.
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

from shared import audit
from shared.settings import CommonSettings

tracer = trace.get_tracer("warren")

_TRACE_PARENT = "traceparent"
"""The key of W3C trace context that identifies the parent span."""

_QUIET = ("aio_pika", "aiormq", "uvicorn.access", "httpx", "httpcore")


def configure(settings: CommonSettings, service: str) -> None:
    """Set up logging and, if an endpoint is set, the export of spans. Call once per process. Raises
    `StartupError` if the audit log cannot be written."""
    _configure_logging(settings)
    if settings.audit_file is not None:
        audit.write_to(settings.audit_file)
    if settings.otlp_endpoint is not None:
        _configure_tracing(settings.otlp_endpoint, service)


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
        # These print message bodies, which contain prompts, at DEBUG and even at ERROR.
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _configure_tracing(endpoint: str, service: str) -> None:
    # Imported here because the exporter takes 0.2 s to import, and most processes export nothing.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
