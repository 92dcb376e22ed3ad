"""Logging and the export of spans and metrics, configured alike in every process.

Modules log through ``logging.getLogger(__name__)`` with ``extra={"request_id": ...}``. Prompts and
answers are never logged.
"""

import json
import logging
import os
import sys
from collections.abc import MutableMapping
from datetime import UTC, datetime
from typing import Any

import msgspec
import structlog
from opentelemetry import metrics, trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from shared.printable import printable, printable_json
from shared.settings import CommonSettings
from shared.telemetry import audit, floods, incidents, requests
from shared.version import VERSION

_OWN_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}
"""The attributes of every record, and the attribute that uvicorn adds to its records. All other
attributes are fields."""

_CAUSED_BY_CLIENTS = ("asyncio", "uvicorn.error")
"""Loggers of libraries that write lines about single connections and requests."""
_LEVELS = {"notice": ("info", "warning")}
"""The levels of all lines and of the lines about single requests, where they differ."""
_QUIET = ("aio_pika", "aiormq", "uvicorn.access", "httpx", "httpcore")


def configure(settings: CommonSettings, service: str) -> None:
    """Set up logging and, if an endpoint is set, the export of spans and metrics. Call once per
    process. Raises `StartupError` if the audit log cannot be written."""
    _configure_logging(settings)
    if settings.audit_file is not None:
        audit.write_to(settings.audit_file)
    if settings.otlp_endpoint is not None and _is_exported("TRACES"):
        _configure_tracing(settings.otlp_endpoint, service)
    if settings.otlp_endpoint is not None and _is_exported("METRICS"):
        _configure_metrics(settings.otlp_endpoint, service)


class JsonFormatter(logging.Formatter):
    """A JSON object in each line.

    Every request has several lines, so they are encoded by msgspec, in a fifth of the time that
    structlog's renderer takes.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        line.update(item for item in vars(record).items() if item[0] not in _OWN_FIELDS)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        try:
            return printable_json(msgspec.json.encode(line, enc_hook=repr).decode())
        except (ValueError, TypeError):  # such as half a surrogate pair, which is not UTF-8
            return json.dumps(line, default=repr)


def console_formatter() -> logging.Formatter:
    """Lines of readable text, in which nothing that a client has sent controls the terminal."""
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[
            structlog.stdlib.add_log_level,
            structlog.stdlib.add_logger_name,
            structlog.stdlib.ExtraAdder(),
            structlog.processors.TimeStamper(fmt="iso"),
            _without_color_message,
        ],
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.format_exc_info,
            _printable,
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()),
        ],
    )


def _without_color_message(
    _logger: Any, _name: str, line: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Leave out the copy of the message that uvicorn adds to its records."""
    line.pop("color_message", None)
    return line


def _printable(
    _logger: Any, _name: str, line: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Escape what would control the terminal, in each name and value. Only a traceback has several
    lines."""
    traceback = line.pop("exception", None)
    shown = {printable(name): _printable_value(value) for name, value in line.items()}
    if traceback is not None:
        shown["exception"] = "\n".join(map(printable, traceback.split("\n")))
    return shown


def _printable_value(value: object) -> object:
    if isinstance(value, bool | int | float | None):
        return value
    return printable(value if isinstance(value, str) else repr(value))


def _configure_logging(settings: CommonSettings) -> None:
    as_console = settings.log_format == "console" or (
        settings.log_format == "auto" and sys.stderr.isatty()
    )
    handler = logging.StreamHandler()
    handler.setFormatter(console_formatter() if as_console else JsonFormatter())
    level, level_of_requests = _LEVELS.get(settings.log_level, (settings.log_level,) * 2)
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    requests.set_level(level_of_requests)
    logging.getLogger("uvicorn.error").addFilter(_named_uvicorn)
    incidents.logger.addFilter(incidents.shorten_loss)
    for name in _CAUSED_BY_CLIENTS:
        logging.getLogger(name).addFilter(floods.LibraryFilter())
    for name in _QUIET:
        # These print message bodies, which contain prompts, at DEBUG and even at ERROR.
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _named_uvicorn(record: logging.LogRecord) -> bool:
    """Rename a record of uvicorn, which uses the logger ``uvicorn.error`` for all of its events."""
    record.name = "uvicorn"
    return True


def _is_exported(signal: str) -> bool:
    """Whether OpenTelemetry's own variable leaves the export of a signal on."""
    exporter = os.environ.get(f"OTEL_{signal}_EXPORTER", "")  # noqa: TID251 (of OpenTelemetry)
    return exporter.lower() != "none"


def _configure_tracing(endpoint: str, service: str) -> None:
    # Imported here because the exporter takes 0.2 s to import, and most processes export nothing.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    provider = TracerProvider(resource=_resource(service))
    exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)


def _configure_metrics(endpoint: str, service: str) -> None:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    exporter = OTLPMetricExporter(endpoint=f"{endpoint.rstrip('/')}/v1/metrics")
    reader = PeriodicExportingMetricReader(exporter)
    metrics.set_meter_provider(MeterProvider([reader], resource=_resource(service)))


def _resource(service: str) -> Resource:
    return Resource.create({"service.name": service, "service.version": VERSION})
