"""Admission control: a limited number of requests, and none while the gateway drains."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from shared.errors import Overloaded, Unavailable


class Admission:
    """Counts the requests in flight."""

    def __init__(self, max_requests: int) -> None:
        self.is_open = True
        self.num_requests = 0
        self._num_uploads = 0
        self._max_requests = max_requests
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Hold a slot. Raises `Overloaded` if all are in use, and `Unavailable` after `close`."""
        self._require_place()
        self.num_requests += 1
        self._is_idle.clear()
        try:
            yield
        finally:
            self.num_requests -= 1
            if not self.num_requests:
                self._is_idle.set()

    @contextmanager
    def upload(self) -> Iterator[None]:
        """Hold a slot during an upload, for which `wait_idle` does not wait. Raises like
        `admit`."""
        self._require_place()
        self._num_uploads += 1
        try:
            yield
        finally:
            self._num_uploads -= 1

    def close(self) -> None:
        """Reject further requests; admitted ones continue."""
        self.is_open = False

    async def wait_idle(self) -> None:
        """Return once no request is in flight."""
        await self._is_idle.wait()

    def _require_place(self) -> None:
        if not self.is_open:
            raise Unavailable("The gateway is shutting down.")
        if self.num_requests + self._num_uploads >= self._max_requests:
            raise Overloaded("Too many requests are in flight.")
