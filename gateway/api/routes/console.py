"""GET /: the console, a page of static files that needs neither the Internet nor a build.

The page is public; it asks for an API key, which it sends with its requests.
"""

import hashlib
from pathlib import Path
from typing import NamedTuple

from fastapi import FastAPI, Request, Response
from fastapi.responses import RedirectResponse
from starlette.exceptions import HTTPException

FILES = Path(__file__).parents[1] / "console"
_PAGE = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "Cache-Control": "no-cache",  # kept, and asked for again with its ETag
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class _File(NamedTuple):
    content: bytes
    headers: dict[str, str]
    etag: str


def install(app: FastAPI) -> None:
    """Serve the page at ``/``, and its parts under ``/console/``."""
    found = (path for path in FILES.rglob("*") if path.suffix in _TYPES)
    files = {path.relative_to(FILES).as_posix(): _read(path) for path in found}

    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def show_console(request: Request) -> Response:
        return _answer(files[_PAGE], request)

    @app.get("/console", include_in_schema=False)
    async def find_console() -> Response:
        return RedirectResponse("./", status_code=308)

    @app.get("/console/{name:path}", include_in_schema=False)
    async def get_part(name: str, request: Request) -> Response:
        if name not in files:
            raise HTTPException(404)
        return _answer(files[name], request)


def _read(path: Path) -> _File:
    content = path.read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**_HEADERS, "Content-Type": _TYPES[path.suffix], "ETag": etag}
    return _File(content, headers, etag)


def _answer(file: _File, request: Request) -> Response:
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=file.headers)
    return Response(file.content, headers=file.headers)
