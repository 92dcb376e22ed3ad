"""A store of traces: takes spans over OTLP, and answers Tempo's request for one trace."""

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from google.protobuf.json_format import MessageToDict  # type: ignore[import-untyped]  # it has no types
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

_PATH = "/api/traces/"


class TraceStore(ThreadingHTTPServer):
    """``spans`` has the spans of each trace, by the trace's id in hexadecimal."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.spans: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)


class _Handler(BaseHTTPRequestHandler):
    server: TraceStore

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.server.spans[span.trace_id.hex()].append(MessageToDict(span))
        self.send_response(200)
        self.end_headers()

    def do_GET(self) -> None:
        spans = self.server.spans.get(self.path.removeprefix(_PATH))
        self.send_response(404 if spans is None else 200)
        self.end_headers()
        trace = {"batches": [{"scopeSpans": [{"spans": spans or []}]}]}
        self.wfile.write(json.dumps(trace).encode())

    def log_message(self, *_: object) -> None:
        """Stay silent."""


@contextmanager
def trace_store() -> Iterator[TraceStore]:
    with TraceStore() as store:
        serving = Thread(target=store.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        yield store
        store.shutdown()
        serving.join()
