"""The worker's HTTP server for /live, /health and /metrics."""

import io
import logging
import sys
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Self
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server
from wsgiref.types import StartResponse, WSGIEnvironment

from shared.errors import StartupError
from shared.settings import Listener
from shared.telemetry import floods, incidents
from shared.telemetry.metrics import CONTENT_TYPE, PROCESS
from worker.process.metrics import WorkerMetrics

logger = logging.getLogger(__name__)


class HealthServer:
    """Serves from its own thread, so that it responds while the model loads and while the event
    loop is busy.

    It listens from the start, so that a port in use is found before the model is loaded. Until
    `watch` is called, the worker is live and not healthy. Without a place it does nothing.
    """

    def __init__(self, place: Listener | None) -> None:
        """Listen. Raises `StartupError`."""
        self._app = _App()
        self._server = None if place is None else _listen(place, self._app)

    def __enter__(self) -> Self:
        if self._server is not None:
            threading.Thread(target=self._server.serve_forever, name="health", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def watch(
        self,
        metrics: WorkerMetrics,
        *,
        is_live: Callable[[], bool],
        is_healthy: Callable[[], bool],
    ) -> None:
        """Answer with the state and the metrics of a worker that has loaded its model."""
        self._app.states = {"/live": is_live, "/health": is_healthy}
        self._app.render = metrics.render


def _listen(place: Listener, app: "_App") -> WSGIServer:
    try:
        return make_server(place.host, place.port, app, _ThreadingServer, _QuietHandler)
    except OSError as error:
        raise StartupError(
            f"cannot listen on health port {place.host}:{place.port}: {error.strerror}; choose "
            "another one with --health-port"
        ) from error


class _ThreadingServer(ThreadingMixIn, WSGIServer):
    """Each connection has a thread of its own, so that a silent connection does not block
    probes."""

    daemon_threads = True

    def handle_error(self, request: object, client_address: tuple[str, int]) -> None:
        """Report the error of a connection, which the base class would print with its traceback."""
        _report_failure(client_address[0])


class _App:
    def __init__(self) -> None:
        self.states: dict[str, Callable[[], bool]] = {
            "/live": lambda: True,
            "/health": lambda: False,
        }
        self.render: Callable[[], bytes] = PROCESS.render
        """The metrics; while the model loads, the metrics of the process alone."""

    def __call__(self, environ: WSGIEnvironment, respond: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            respond("200 OK", [("Content-Type", CONTENT_TYPE)])
            return [self.render()]
        is_good = self.states.get(path)
        if is_good is None:
            status = "404 Not Found"
        else:
            status = "200 OK" if is_good() else "503 Service Unavailable"
        respond(status, [("Content-Type", "text/plain")])
        return [f"{status[4:]}\n".encode()]


class _QuietHandler(WSGIRequestHandler):
    timeout = 5
    """Seconds until a silent connection is closed."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (http.server's name)
        """Suppress the log line of each request: probes arrive every few seconds."""

    def get_stderr(self) -> "_ErrorStream":
        return _ErrorStream(self.client_address[0])


class _ErrorStream(io.StringIO):
    """Where wsgiref prints the traceback of a response that failed; a line is logged instead."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self._address = address

    def flush(self) -> None:
        _report_failure(self._address)


def _report_failure(address: str) -> None:
    """Report the exception that is being handled."""
    error, event = sys.exception(), "health request failed"
    if isinstance(error, OSError):  # the client left, or sends or reads too slowly
        facts = {"address": address, "reason": f"{type(error).__name__}: {error}"}
        floods.warn(logger, event, "health request failed", facts)
    elif error is not None:
        incidents.report("request", event, error, address=address)
