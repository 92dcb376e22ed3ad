"""A Hugging Face hub with a single model, as far as downloads need it."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serve_hub(
    repository: str,
    files: Mapping[str, bytes],
    *,
    revision: str = "main",
    commit: str = COMMIT,
    token: str = "",
) -> Iterator[str]:
    """Serve ``files`` as a revision of the model ``repository``, which is this commit; yields the
    endpoint's URL. Clients have to send ``token``, unless it is empty."""
    api = f"/api/models/{repository}/revision/"

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(self._head())

        def do_HEAD(self) -> None:
            self._head()

        def _head(self) -> bytes:
            """Send status and headers; returns the body."""
            path = self.path.partition("?")[0]
            body, content_type = _answer(path, repository, revision, commit, files)
            is_permitted = not token or self.headers["Authorization"] == f"Bearer {token}"
            if not is_permitted:
                body = None
            self.send_response(404 if body is None else 200)
            if body is None:
                is_known = is_permitted and path.startswith(api)
                self.send_header("X-Error-Code", f"{'Revision' if is_known else 'Repo'}NotFound")
                body = b"{}"
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Type", content_type)
            self.send_header("X-Repo-Commit", commit)
            self.send_header("ETag", f'"{_oid(body)}"')
            self.end_headers()
            return body

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _answer(
    path: str, repository: str, revision: str, commit: str, files: Mapping[str, bytes]
) -> tuple[bytes | None, str]:
    """The body at ``path``, None if there is none, and its type."""
    api = f"/api/models/{repository}"
    if path in (f"{api}/revision/{revision}", f"{api}/revision/{commit}"):
        siblings = [{"rfilename": name} for name in files]
        info = {"id": repository, "sha": commit, "siblings": siblings}
        return json.dumps(info).encode(), "application/json"
    if path == f"{api}/tree/{commit}":
        tree = [
            {"type": "file", "path": name, "size": len(body), "oid": _oid(body)}
            for name, body in files.items()
        ]
        return json.dumps(tree).encode(), "application/json"
    name = path.removeprefix(f"/{repository}/resolve/{commit}/")
    return files.get(name), "application/octet-stream"


def _oid(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()
