"""A receiver of OTLP over HTTP."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import ResourceMetrics


class Collector(HTTPServer):
    """Takes what is posted to it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.posts: list[tuple[str, bytes]] = []
        """Paths and bodies."""

    @property
    def metrics(self) -> list[ResourceMetrics]:
        """The metrics that were exported, in their order."""
        bodies = [body for path, body in self.posts if path == "/v1/metrics"]
        requests = [ExportMetricsServiceRequest.FromString(body) for body in bodies]
        return [one for request in requests for one in request.resource_metrics]


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.posts.append((self.path, body))
        self.send_response(200)
        self.end_headers()

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
