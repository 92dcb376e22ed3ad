"""Who gets in: a bounded number of requests, and nobody once the gateway drains."""

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
        """Hold a place. Raises `Overloaded` when there is none, `Unavailable` after `close`."""
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
        """Hold a place while a body comes in; `wait_idle` does not wait for it. Raises like
        `admit`."""
        self._require_place()
        self._num_uploads += 1
        try:
            yield
        finally:
            self._num_uploads -= 1

    def close(self) -> None:
        """Let nobody in any more; those inside stay."""
        self.is_open = False

    async def wait_idle(self) -> None:
        """Return once nobody is inside."""
        await self._is_idle.wait()

    def _require_place(self) -> None:
        if not self.is_open:
            raise Unavailable("The gateway is shutting down.")
        if self.num_requests + self._num_uploads >= self._max_requests:
            raise Overloaded("Too many requests are in flight.")
