"""A lock that tenants take in turn."""

import asyncio
import time
from collections import deque
from collections.abc import Callable

from shared.errors import Overloaded

_HALF_LIFE_S = 30.0
"""Seconds after which half of the time that a tenant has used is forgotten."""
_MAX_WAITING = 1_000
"""Turns of one tenant: more than a worker has jobs at once."""
_MAX_TENANTS = 1024


class Turns:
    """A lock. Of the tenants that wait for it, next is the one that has used it least of late."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._is_taken = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """The waiting turns of each tenant that has any."""
        self._used: dict[str, tuple[float, float]] = {}
        """The seconds that each tenant has used, and when that was last counted."""

    async def take(self, tenant: str) -> None:
        """Wait for a turn. Raises `Overloaded` if too many turns of the tenant are waiting."""
        if not self._is_taken:
            self._is_taken = True
            return
        waiting = self._waiting.setdefault(tenant, deque())
        if len(waiting) >= _MAX_WAITING:
            raise Overloaded("Too many constraints are waiting to be checked.")
        turn = asyncio.get_running_loop().create_future()
        waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()
            raise

    def leave(self, tenant: str, used_s: float) -> None:
        """End a turn, which has used this many seconds."""
        now = self._clock()
        self._used[tenant] = self._used_s(tenant, now) + used_s, now
        if len(self._used) > _MAX_TENANTS:
            del self._used[min(self._used, key=lambda one: self._used_s(one, now))]
        self._pass_on()

    def _pass_on(self) -> None:
        now = self._clock()
        while self._waiting:
            tenant = min(self._waiting, key=lambda one: self._used_s(one, now))
            turn = self._waiting[tenant].popleft()
            if not self._waiting[tenant]:
                del self._waiting[tenant]
            if not turn.done():  # otherwise its request was cancelled
                turn.set_result(None)
                return
        self._is_taken = False

    def _used_s(self, tenant: str, now: float) -> float:
        used_s, at = self._used.get(tenant, (0.0, now))
        return float(used_s * 0.5 ** ((now - at) / _HALF_LIFE_S))
