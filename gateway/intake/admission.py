"""Admission control: limits on the number of requests in flight and on the total size of their
bodies, and no requests while the gateway drains."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from shared.errors import Overloaded, Unavailable


class Admission:
    """Counts the requests in flight, and the bytes of their bodies."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self.is_open = True
        self.num_requests = 0
        self._num_uploads = 0
        self._num_bytes = 0
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @contextmanager
    def enter(self) -> Iterator["Entry"]:
        """Hold a slot. Raises `Overloaded` if all are in use, and `Unavailable` after `close`."""
        self._require_place()
        entry = Entry(self)
        self._num_uploads += 1
        try:
            yield entry
        finally:
            self._num_bytes -= entry.num_bytes
            if entry.has_begun:
                self._leave()
            else:
                self._num_uploads -= 1

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Hold a slot for a request without a body. Raises like `enter`."""
        with self.enter() as entry:
            entry.begin()
            yield

    def close(self) -> None:
        """Reject further requests; admitted ones continue."""
        self.is_open = False

    async def wait_idle(self) -> None:
        """Return once no request is in flight."""
        await self._is_idle.wait()

    def begin(self) -> None:
        """Turn an upload into a request. Raises `Unavailable` after `close`."""
        self._require_open()
        self._num_uploads -= 1
        self.num_requests += 1
        self._is_idle.clear()

    def hold(self, num_bytes: int) -> None:
        """Raises `Overloaded` if the bodies in flight become too large together."""
        if self._num_bytes + num_bytes > self._max_bytes:
            raise Overloaded(
                "The total size of the requests in flight is at its limit.",
                limit="max_bytes_in_flight",
            )
        self._num_bytes += num_bytes

    def _leave(self) -> None:
        self.num_requests -= 1
        if not self.num_requests:
            self._is_idle.set()

    def _require_place(self) -> None:
        self._require_open()
        if self.num_requests + self._num_uploads >= self._max_requests:
            raise Overloaded("Too many requests are in flight.", limit="max_requests")

    def _require_open(self) -> None:
        if not self.is_open:
            raise Unavailable("The gateway is shutting down.")


class Entry:
    """The slot of one request."""

    def __init__(self, admission: Admission) -> None:
        self.has_begun = False
        self.num_bytes = 0
        self._admission = admission

    def begin(self) -> None:
        """Call this once the request's body is uploaded: `Admission.wait_idle` waits for the
        request from then on. Raises `Unavailable` after `Admission.close`."""
        self._admission.begin()
        self.has_begun = True

    def hold(self, num_bytes: int) -> None:
        """Count memory until the request ends. Raises `Overloaded`."""
        self._admission.hold(num_bytes)
        self.num_bytes += num_bytes
