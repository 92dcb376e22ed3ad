"""Reads request bodies with a size limit, and rejects those that are not plain JSON."""

import asyncio

from fastapi import Request
from starlette.exceptions import HTTPException

_TIMEOUT_S = 60.0


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Read a JSON body of at most ``max_bytes``. Raises HTTPException 408, 413 or 415."""
    _check_headers(request, max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
    except TimeoutError:
        raise HTTPException(408, "The body did not arrive in time.") from None
    return bytes(body)


def _check_headers(request: Request, max_bytes: int) -> None:
    # A small compressed body can decompress to a huge one.
    if request.headers.get("content-encoding", "identity") != "identity":
        raise HTTPException(415, "Compressed bodies are not supported.")
    media_type = request.headers.get("content-type", "application/json").partition(";")[0]
    if media_type.strip().lower() != "application/json":
        raise HTTPException(415, "The content type must be application/json.")
    if int(request.headers.get("content-length", 0)) > max_bytes:
        raise _too_large(max_bytes)


def _too_large(max_bytes: int) -> HTTPException:
    return HTTPException(413, f"The body exceeds {max_bytes} bytes.")
