"""Admission control: a limited number of requests, and none while the gateway drains."""

import asyncio
from collections.abc import Callable, Iterator
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
    def enter(self) -> Iterator[Callable[[], None]]:
        """Hold a slot. Raises `Overloaded` if all are in use, and `Unavailable` after `close`.

        Yields a function to call once the request's body is uploaded: `wait_idle` waits for the
        request from then on. It raises `Unavailable` after `close`.
        """
        self._require_place()
        has_begun = False

        def begin() -> None:
            nonlocal has_begun
            self._require_open()
            has_begun = True
            self._num_uploads -= 1
            self.num_requests += 1
            self._is_idle.clear()

        self._num_uploads += 1
        try:
            yield begin
        finally:
            if has_begun:
                self._leave()
            else:
                self._num_uploads -= 1

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Hold a slot for a request without a body. Raises like `enter`."""
        with self.enter() as begin:
            begin()
            yield

    def close(self) -> None:
        """Reject further requests; admitted ones continue."""
        self.is_open = False

    async def wait_idle(self) -> None:
        """Return once no request is in flight."""
        await self._is_idle.wait()

    def _leave(self) -> None:
        self.num_requests -= 1
        if not self.num_requests:
            self._is_idle.set()

    def _require_place(self) -> None:
        self._require_open()
        if self.num_requests + self._num_uploads >= self._max_requests:
            raise Overloaded("Too many requests are in flight.")

    def _require_open(self) -> None:
        if not self.is_open:
            raise Unavailable("The gateway is shutting down.")
