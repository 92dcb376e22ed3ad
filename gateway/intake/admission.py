"""Admission control: limits on the number of requests in flight and on the sizes of their bodies,
and no requests while the gateway drains.

The values of a body are counted before they are parsed, because an object takes up to a hundred
times the memory of the two bytes that describe it.
"""

import asyncio
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from fastapi import Request
from starlette.exceptions import HTTPException

from shared.errors import InvalidRequest, Overloaded, ShuttingDown
from shared.off_loop import off_loop

_RESERVED_SHARE = 8
"""One in this many is kept for tenants that hold less than their share."""
MAX_VALUES = 1 << 18
MAX_CONTAINERS = 1 << 15
"""Objects and arrays."""
BYTES_OF_VALUE = 64
"""The approximate memory of one JSON value, without its text."""
_NO_STRUCTURE = bytes(set(range(256)) - set(b'",[{'))
_TIMEOUT_S = 60.0
"""Seconds within which a body must arrive."""


class Admission:
    """Counts the requests in flight, and the bytes of their bodies and of what they read."""

    def __init__(self, max_requests: int, max_bytes: int, *, has_tenants: bool = True) -> None:
        """Without tenants nothing is kept for others."""
        self.is_open = True
        self.num_requests = 0
        self._slots = _Shared(
            max_requests, "Too many requests are in flight.", "max_requests", has_tenants
        )
        self._bytes = _Shared(
            max_bytes,
            "The total size of the requests in flight is at its limit.",
            "max_bytes_in_flight",
            has_tenants,
        )
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @contextmanager
    def admit_with_body(self, tenant: str) -> Iterator["Entry"]:
        """Hold a slot for a request of ``tenant`` whose body is still to be read. `wait_idle` waits
        for it once `Entry.begin` is called.

        Raises `Overloaded` if all slots are in use, or the last ones are kept for other tenants,
        and `ShuttingDown` after `close`.
        """
        self._require_open()
        self._slots.take(tenant, 1)
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
        """Reject further requests; admitted ones continue."""
        self.is_open = False

    async def wait_idle(self) -> None:
        """Return once no request is in flight."""
        await self._is_idle.wait()

    def begin(self) -> None:
        """Turn an upload into a request. Raises `ShuttingDown` after `close`."""
        self._require_open()
        self.num_requests += 1
        self._is_idle.clear()

    def hold(self, tenant: str, num_bytes: int) -> None:
        """Raises `Overloaded` if the bodies in flight become too large together."""
        self._bytes.take(tenant, num_bytes)

    def _end(self) -> None:
        self.num_requests -= 1
        if not self.num_requests:
            self._is_idle.set()

    def _require_open(self) -> None:
        if not self.is_open:
            raise ShuttingDown("The gateway is shutting down.")


class Entry:
    """The slot of one request."""

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


class _Shared:
    """An amount that tenants share.

    Its last eighth is kept for tenants that hold less than an equal share among the active tenants
    and one that is still to come, so that one tenant does not keep the others out.
    """

    def __init__(self, amount: int, message: str, limit: str, has_tenants: bool) -> None:
        """``message`` and ``limit``, a setting, describe the error of those that are refused."""
        self._amount = self._free = amount
        self._num_reserved = amount // _RESERVED_SHARE if has_tenants else 0
        self._held: Counter[str] = Counter()
        self._message = message
        self._limit = limit

    def take(self, tenant: str, amount: int) -> None:
        """Raises `Overloaded`."""
        left = self._free - amount
        if left < 0 or (left < self._num_reserved and not self._is_below_share(tenant)):
            raise Overloaded(self._message, limit=self._limit)
        self._free = left
        self._held[tenant] += amount

    def give_back(self, tenant: str, amount: int) -> None:
        self._free += amount
        self._held[tenant] -= amount
        if not self._held[tenant]:
            del self._held[tenant]

    def _is_below_share(self, tenant: str) -> bool:
        num_active = len(self._held) + (tenant not in self._held)
        return self._held[tenant] * (num_active + 1) < self._amount


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
    # Two quotes side by side are an empty string, or the end of one and the start of another.
    structure = unescaped.translate(None, _NO_STRUCTURE).replace(b'""', b"")
    if structure.count(b'"') > 4 * MAX_VALUES:  # a name and a string for each value
        raise _too_many_values()
    return b"".join(structure.split(b'"')[::2])


def _check_headers(request: Request, max_bytes: int) -> None:
    # A small compressed body can decompress to a huge one.
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
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
