"""A receiver of OTLP over HTTP, which answers Tempo's request for a trace."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from google.protobuf.json_format import MessageToDict  # type: ignore[import-untyped]  # it has no types
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import ResourceMetrics

_TEMPO = "/api/traces/"


class Collector(ThreadingHTTPServer):
    """Takes what is posted to it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.posts: list[tuple[str, bytes]] = []
        """Paths and bodies."""

    @property
    def metrics(self) -> list[ResourceMetrics]:
        """The metrics that were exported, in their order."""
        requests = map(ExportMetricsServiceRequest.FromString, self._bodies("/v1/metrics"))
        return [one for request in requests for one in request.resource_metrics]

    def spans(self, trace_id: str) -> list[dict[str, Any]]:
        """The spans of a trace, whose id is in hexadecimal."""
        requests = map(ExportTraceServiceRequest.FromString, self._bodies("/v1/traces"))
        return [
            MessageToDict(span)
            for request in requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
            if span.trace_id.hex() == trace_id
        ]

    def _bodies(self, wanted: str) -> list[bytes]:
        return [body for path, body in self.posts if path == wanted]


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.posts.append((self.path, body))
        self.send_response(200)
        self.end_headers()

    def do_GET(self) -> None:
        spans = self.server.spans(self.path.removeprefix(_TEMPO))
        self.send_response(200 if spans else 404)
        self.end_headers()
        trace = {"batches": [{"scopeSpans": [{"spans": spans}]}]}
        self.wfile.write(json.dumps(trace).encode())

    def log_message(self, *_: object) -> None:
        """Stay silent."""


@contextmanager
def serving() -> Iterator[Collector]:
    with Collector() as collector:
        thread = Thread(target=collector.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield collector
        collector.shutdown()
        thread.join()
