"""Admission control: limits on the number of requests in flight and on the total size of their
bodies, and no requests while the gateway drains."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from shared.errors import Overloaded, ShuttingDown

_RESERVED_SHARE = 8
"""One in this many is kept for tenants that hold less than their share."""


class Admission:
    """Counts the requests in flight, and the bytes of their bodies."""

    def __init__(self, max_requests: int, max_bytes: int, *, has_tenants: bool = True) -> None:
        """Without tenants nothing is kept for others."""
        self.is_open = True
        self.num_requests = 0
        self._places = _Shared(
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
    def enter(self, tenant: str) -> Iterator["Entry"]:
        """Hold a slot for a request of ``tenant``. Raises `Overloaded` if all are in use, or the
        last ones are kept for other tenants, and `ShuttingDown` after `close`."""
        self._require_open()
        self._places.take(tenant, 1)
        entry = Entry(self, tenant)
        try:
            yield entry
        finally:
            self._bytes.give_back(tenant, entry.num_bytes)
            self._places.give_back(tenant, 1)
            if entry.has_begun:
                self._end()

    @contextmanager
    def admit(self, tenant: str) -> Iterator[None]:
        """Hold a slot for a request without a body. Raises like `enter`."""
        with self.enter(tenant) as entry:
            entry.begin()
            yield

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
