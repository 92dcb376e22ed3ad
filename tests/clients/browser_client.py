"""Chromium: a page of another origin leaves a stream and resumes it with an EventSource."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

from tests.clients.checks import ANSWER, equal, report, target

TARGET = target()
PAGE = Path(__file__).with_name("browser.html")
_TIMEOUT_S = 90
_reports: Queue[Any] = Queue()


class Page(BaseHTTPRequestHandler):
    """Serves the page and receives its report."""

    def do_GET(self) -> None:
        if self.path == "/target":
            about = {"url": TARGET.url, "key": TARGET.api_key, "model": TARGET.model}
            self._send("application/json", json.dumps(about).encode())
        elif self.path == "/":
            self._send("text/html", PAGE.read_bytes())
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        _reports.put(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self._send("text/plain", b"")

    def _send(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def page() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", int(TARGET.page_port)), Page)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{TARGET.page_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def visit(url: str) -> Any:
    """Open a page in a fresh browser; returns what it reports."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
        browser = subprocess.Popen(["chromium", *options, url], stdout=sys.stderr)
        try:
            return _reports.get(timeout=_TIMEOUT_S)
        finally:
            browser.terminate()
            browser.wait()


def is_left(found: Any) -> None:
    equal(found.get("error"), None)
    equal(found["status"], 200)
    equal([bool(found["id"]), bool(found["token"])], [True, True])


def is_followed(found: Any) -> None:
    *chunks, done = found["data"]
    said = [json.loads(chunk)["choices"][0] for chunk in chunks]
    text = "".join(choice["delta"].get("content") or "" for choice in said)
    assert text.startswith(ANSWER), text
    equal(said[-1]["finish_reason"], "length")
    equal(done, "[DONE]")


def is_ended(found: Any) -> None:
    numbered = found["ids"][:-1]
    equal(len(numbered), len(set(numbered)))
    equal(found["errors"], 2)


if __name__ == "__main__":
    with page() as url:
        found = visit(url)
    report("a page of an allowed origin starts a stream and leaves", partial(is_left, found))
    report("EventSource with a stream token gets all of it", partial(is_followed, found))
    report("EventSource comes back once, and 204 ends it", partial(is_ended, found))
