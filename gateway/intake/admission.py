"""Admission control: limits on the number of requests in flight and on the sizes of their bodies,
and no requests while the gateway drains.

The values of a body are counted before they are parsed, because an object takes up to a hundred
times the memory of the two bytes that describe it.
"""

import asyncio
from codecs import BOM_UTF8
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from fastapi import Request
from starlette.exceptions import HTTPException

from gateway.intake.shared_amount import SharedAmount
from shared.errors import InvalidRequest, Overloaded, ShuttingDown
from shared.off_loop import off_loop

MAX_VALUES = 1 << 18
MAX_CONTAINERS = 1 << 15
"""Objects and arrays."""
BYTES_OF_VALUE = 64
"""The approximate memory of a JSON value, without its text."""
_NO_STRUCTURE = bytes(set(range(256)) - set(b'",[{'))
_TIMEOUT_S = 60.0
"""Seconds within which a body must arrive."""


class Admission:
    """Counts the requests in flight, and the bytes of their bodies and of the data that they
    read."""

    def __init__(self, max_requests: int, max_bytes: int, *, has_tenants: bool = True) -> None:
        """Without tenants nothing is kept for others."""
        self.is_open = True
        self.num_requests = 0
        self._slots = SharedAmount(max_requests, has_owners=has_tenants)
        self._bytes = SharedAmount(max_bytes, has_owners=has_tenants)
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @contextmanager
    def admit_with_body(self, tenant: str) -> Iterator["Entry"]:
        """Hold a slot for a request of ``tenant`` whose body is still to be read. `wait_idle` waits
        for it once `Entry.begin` is called.

        Raises `Overloaded` if all slots are in use, or the last slots are kept for other tenants,
        and `ShuttingDown` after `close`.
        """
        self.require_open()
        if not self._slots.take(tenant, 1):
            raise Overloaded("Too many requests are in flight.", limit="max_requests")
        entry = Entry(self, tenant)
        try:
            yield entry
        finally:
            self._bytes.give_back(tenant, entry.num_bytes)
            self._slots.give_back(tenant, 1)
            if entry.has_begun:
                self._end()

    @contextmanager
    def admit_without_body(self, tenant: str) -> Iterator["Entry"]:
        """Hold a slot for a request without a body, which begins at once. Raises like
        `admit_with_body`."""
        with self.admit_with_body(tenant) as entry:
            entry.begin()
            yield entry

    def close(self) -> None:
        """Reject further requests; admitted requests continue."""
        self.is_open = False

    async def wait_idle(self) -> None:
        """Return once no request is in flight."""
        await self._is_idle.wait()

    def begin(self) -> None:
        """Turn an upload into a request. Raises `ShuttingDown` after `close`."""
        self.require_open()
        self.num_requests += 1
        self._is_idle.clear()

    def hold(self, tenant: str, num_bytes: int) -> None:
        """Raises `Overloaded` if the bodies in flight become too large together."""
        if not self._bytes.take(tenant, num_bytes):
            raise Overloaded(
                "The total size of the requests in flight is at its limit.",
                limit="max_bytes_in_flight",
            )

    def _end(self) -> None:
        self.num_requests -= 1
        if not self.num_requests:
            self._is_idle.set()

    def require_open(self) -> None:
        """Raises `ShuttingDown` after `close`."""
        if not self.is_open:
            raise ShuttingDown("The gateway is shutting down.")


class Entry:
    """The slot of a request."""

    def __init__(self, admission: Admission, tenant: str) -> None:
        self.has_begun = False
        self.num_bytes = 0
        self._admission = admission
        self._tenant = tenant

    def begin(self) -> None:
        """Call this once the request's body is uploaded: `Admission.wait_idle` waits for the
        request from then on. Raises `ShuttingDown` after `Admission.close`."""
        self._admission.begin()
        self.has_begun = True

    def hold(self, num_bytes: int) -> None:
        """Count memory until the request ends. Raises `Overloaded`."""
        self._admission.hold(self._tenant, num_bytes)
        self.num_bytes += num_bytes


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
    content = bytes(body).removeprefix(BOM_UTF8)
    del body
    entry.hold(BYTES_OF_VALUE * await off_loop(partial(count_values, content), len(content)))
    return content


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
    # Two quotes side by side are an empty string, or the end of a string and the start of the next
    # string.
    structure = unescaped.translate(None, _NO_STRUCTURE).replace(b'""', b"")
    if structure.count(b'"') > 4 * MAX_VALUES:  # a name and a string for each value
        raise _too_many_values()
    return b"".join(structure.split(b'"')[::2])


def _check_headers(request: Request, max_bytes: int) -> None:
    # A small compressed body can decompress to a huge body.
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise HTTPException(415, "Compressed bodies are not supported.")
    # JSON is required, because a web page of any site may send other types without asking (CORS).
    media_type = request.headers.get("content-type", "").partition(";")[0]
    if media_type.strip().lower() != "application/json":
        raise HTTPException(415, "The content type must be application/json.")
    if int(request.headers.get("content-length", 0)) > max_bytes:
        raise _too_large(max_bytes)


def _too_large(max_bytes: int) -> HTTPException:
    return HTTPException(413, f"The body exceeds {max_bytes} bytes.")


def _too_many_values() -> InvalidRequest:
    return InvalidRequest(f"The body has more than {MAX_VALUES} values.")
