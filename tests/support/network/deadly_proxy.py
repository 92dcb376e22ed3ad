"""An HTTP proxy that kills the client in the middle of its requests."""

import random
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import httpx

from tests.support import PATIENCE_S
from tests.support.deployment.processes import NO_TLS

_NOT_FORWARDED = ("host", "connection", "accept-encoding")
_MAX_DELAY_S = 0.02


class DeadlyProxy:
    """Forwards requests to the server at ``url``. Once `arm` is called, it kills the client within
    its next requests: before the server has the request, after that, or soon after its answer."""

    def __init__(self, url: str, chance: random.Random) -> None:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                """Write no access log."""

            def do_GET(self) -> None:
                with proxy._turn:
                    proxy._forward(self)

            def do_POST(self) -> None:
                with proxy._turn:
                    proxy._forward(self)

        self._chance = chance
        self._client = httpx.Client(base_url=url, timeout=PATIENCE_S, verify=NO_TLS)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._num_left, self._moment = 0, ""
        self._kill: Callable[[], object] = lambda: None
        self._turn = threading.Lock()
        """One request at a time: a client that is about to be killed gets no further answer."""
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._client.close()

    def arm(self, kill: Callable[[], object], longest: int) -> None:
        """Kill the client within its next ``longest`` requests."""
        self._kill = kill
        self._num_left = self._chance.randint(1, longest)
        self._moment = self._chance.choice(("before", "after", "answered"))

    def _forward(self, handler: BaseHTTPRequestHandler) -> None:
        self._num_left -= 1
        moment = self._moment if self._num_left == 0 else ""
        num_bytes = int(handler.headers.get("content-length", 0))
        body = handler.rfile.read(num_bytes)
        if moment == "before" or len(body) < num_bytes:
            return self._end(handler)
        headers = {
            name: value
            for name, value in handler.headers.items()
            if name.lower() not in _NOT_FORWARDED
        }
        answer = self._client.request(handler.command, handler.path, content=body, headers=headers)
        if moment == "after":
            return self._end(handler)
        handler.send_response(answer.status_code)
        handler.send_header("content-type", answer.headers["content-type"])
        handler.send_header("content-length", str(len(answer.content)))
        handler.end_headers()
        handler.wfile.write(answer.content)
        if moment == "answered":
            time.sleep(self._chance.uniform(0, _MAX_DELAY_S))
            self._end(handler)
        return None

    def _end(self, handler: BaseHTTPRequestHandler) -> None:
        self._kill()
        handler.close_connection = True
