"""Reads request bodies within limits of their size, and rejects those that are not plain JSON.

The values of a body are counted before they are parsed, because an object takes up to a hundred
times the memory of the two bytes that describe it.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fastapi import Request
from starlette.exceptions import HTTPException

from gateway.intake.admission import Entry
from shared.errors import InvalidRequest

MAX_VALUES = 1 << 18
MAX_CONTAINERS = 1 << 15
"""Objects and arrays."""
BYTES_OF_VALUE = 64
"""What a value takes in memory, about, besides its text."""
_NO_STRUCTURE = bytes(set(range(256)) - set(b'",[{'))
_TIMEOUT_S = 60.0
_LARGE_BYTES = 64 << 10
_PARSER = ThreadPoolExecutor(max_workers=1, thread_name_prefix="parser")
"""One thread: several would compete with the event loop for the interpreter's lock."""

_Parsed = TypeVar("_Parsed")


async def read_body(request: Request, max_bytes: int, entry: Entry) -> bytes:
    """Read a JSON body of at most ``max_bytes``, which counts until the request ends.

    Raises HTTPException 408, 413 or 415, `InvalidRequest` if the body has too many values, and
    `Overloaded` if it does not fit in beside the others.
    """
    _check_headers(request, max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            async for chunk in request.stream():
                if len(body) + len(chunk) > max_bytes:
                    raise _too_large(max_bytes)
                entry.hold(len(chunk))
                body += chunk
    except TimeoutError:
        raise HTTPException(408, "The body did not arrive in time.") from None
    content = bytes(body)
    del body
    entry.hold(BYTES_OF_VALUE * await parsed(count_values, content))
    return content


async def parsed(parse: Callable[[bytes], _Parsed], body: bytes) -> _Parsed:
    """What ``parse`` makes of a body; it is called in a thread if the body is large, so that other
    requests go on. Raises what ``parse`` raises."""
    if len(body) < _LARGE_BYTES:
        return parse(body)
    return await asyncio.get_running_loop().run_in_executor(_PARSER, parse, body)


def count_values(body: bytes) -> int:
    """How many values a JSON document has, at most. Raises `InvalidRequest` if these are too many.

    Every value but the first follows a comma or begins an object or array. Commas and brackets in
    strings are excluded only if a document seems to be too large with them.
    """
    num_containers, num_values = _counts(body)
    if num_containers <= MAX_CONTAINERS and num_values <= MAX_VALUES:
        return num_values
    num_containers, num_values = _counts(_without_strings(body))
    if num_containers > MAX_CONTAINERS:
        raise InvalidRequest(f"The body has more than {MAX_CONTAINERS} objects and arrays.")
    if num_values > MAX_VALUES:
        raise _too_many_values()
    return num_values


def _counts(body: bytes) -> tuple[int, int]:
    """The numbers of containers and of all values, as if no string had commas or brackets."""
    num_containers = body.count(b"[") + body.count(b"{")
    return num_containers, 1 + num_containers + body.count(b",")


def _without_strings(body: bytes) -> bytes:
    """The commas and opening brackets that are not part of a string. The result may be wrong
    after the first error in a document that is not valid JSON, where the parser stops, too."""
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
    # Two quotes side by side are an empty string, or the end of one and the start of another.
    structure = unescaped.translate(None, _NO_STRUCTURE).replace(b'""', b"")
    if structure.count(b'"') > 4 * MAX_VALUES:  # a name and a string for each value
        raise _too_many_values()
    return b"".join(structure.split(b'"')[::2])


def _check_headers(request: Request, max_bytes: int) -> None:
    # A small compressed body can decompress to a huge one.
    if request.headers.get("content-encoding", "identity") != "identity":
        raise HTTPException(415, "Compressed bodies are not supported.")
    # Demanded, because a web page of any site may send other types without asking (CORS).
    media_type = request.headers.get("content-type", "").partition(";")[0]
    if media_type.strip().lower() != "application/json":
        raise HTTPException(415, "The content type must be application/json.")
    if int(request.headers.get("content-length", 0)) > max_bytes:
        raise _too_large(max_bytes)


def _too_large(max_bytes: int) -> HTTPException:
    return HTTPException(413, f"The body exceeds {max_bytes} bytes.")


def _too_many_values() -> InvalidRequest:
    return InvalidRequest(f"The body has more than {MAX_VALUES} values.")
