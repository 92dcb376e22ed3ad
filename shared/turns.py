"""Work that tenants do in turn."""

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from shared.errors import Overloaded

_HALF_LIFE_S = 30.0
"""Seconds after which half of the time that a tenant has used is forgotten."""
_MAX_WAITING = 1_000
"""Turns of a tenant: more than a worker has jobs at once."""
_MAX_TENANTS = 1024
NICENESS = 5
"""The niceness that is added to work that competes with engine and event loop for the cores.

A thread that waits for a core may hold the interpreter's lock, and then the event loop waits with
it. Beside eight busy processes on two cores, niceness 19 stopped workers for up to 30 s and 10 for
11 s, so that the broker closed their connections; 5 does not. Beside the tokenization of long
texts, streams run at 87% of their speed (89% with 19, 43% with 0).
"""

_Result = TypeVar("_Result")


class Turns:
    """A semaphore in which a tenant holds at most one place. The next place goes to the waiting
    tenant that has recently used the least time.

    The anonymous tenant, whose name is empty, stands for all clients if no API keys are required:
    it may hold all places.
    """

    def __init__(self, num_places: int = 1, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_places = num_places
        self._clock = clock
        self._holding: list[str] = []
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """The waiting turns of each tenant that has any."""
        self._used: dict[str, tuple[float, float]] = {}
        """The seconds that each tenant has used, and when that was last counted."""

    async def take(self, tenant: str) -> None:
        """Wait for a turn. Raises `Overloaded` if too many turns of the tenant are waiting."""
        if self._may_enter(tenant):
            self._holding.append(tenant)
            return
        waiting = self._waiting.setdefault(tenant, deque())
        if len(waiting) >= _MAX_WAITING:
            raise Overloaded("Too many requests of this tenant are waiting.")
        turn = asyncio.get_running_loop().create_future()
        waiting.append(turn)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self._holding.remove(tenant)
                self._pass_on()
            turn.cancel()
            raise

    def leave(self, tenant: str, used_s: float) -> None:
        """End a turn, which has used this many seconds."""
        self._holding.remove(tenant)
        now = self._clock()
        self._used[tenant] = self._used_s(tenant, now) + used_s, now
        if len(self._used) > _MAX_TENANTS:
            del self._used[min(self._used, key=lambda one: self._used_s(one, now))]
        self._pass_on()

    def _may_enter(self, tenant: str) -> bool:
        may_hold_more = not tenant or tenant not in self._holding
        return may_hold_more and len(self._holding) < self._num_places

    def _pass_on(self) -> None:
        now = self._clock()
        while ready := [tenant for tenant in self._waiting if self._may_enter(tenant)]:
            tenant = min(ready, key=lambda one: self._used_s(one, now))
            turn = self._waiting[tenant].popleft()
            if not self._waiting[tenant]:
                del self._waiting[tenant]
            if not turn.done():  # otherwise its request was cancelled
                self._holding.append(tenant)
                turn.set_result(None)

    def _used_s(self, tenant: str, now: float) -> float:
        used_s, at = self._used.get(tenant, (0.0, now))
        return float(used_s * 0.5 ** ((now - at) / _HALF_LIFE_S))


class TenantThreads:
    """Threads that do the work of each tenant in sequence, outside the event loop.

    Unless they only wait, their priority is lower than that of the engine and the event loop: a
    thread of the engine that waits for a core holds up all the others.
    """

    def __init__(self, num_threads: int, name: str, *, only_wait: bool = False) -> None:
        """``only_wait``: keep the priority of the process, which processes that the threads start
        inherit."""
        self._turns = Turns(num_threads)
        # On Linux, `os.nice` concerns the calling thread alone.
        initializer = None if only_wait else partial(os.nice, NICENESS)
        self._threads = ThreadPoolExecutor(num_threads, name, initializer)

    async def run(
        self, tenant: str, work: Callable[[], _Result], *, max_wait_s: float | None = None
    ) -> _Result:
        """Do ``work`` in the tenant's turn. Raises `Overloaded` if too much of it is waiting, or if
        the turn does not come within ``max_wait_s``."""
        try:
            async with asyncio.timeout(max_wait_s):
                await self._turns.take(tenant)
        except TimeoutError:
            raise Overloaded("Too many requests are waiting for their turn.") from None
        began = time.monotonic()
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)

        def leave(ended: asyncio.Future[_Result]) -> None:
            self._turns.leave(tenant, time.monotonic() - began)
            # Nobody asks for the error of work whose request was cancelled, and asyncio would
            # report it as one that was forgotten.
            if not ended.cancelled():
                ended.exception()

        # The turn lasts as long as the work, which continues if its request is cancelled.
        running.add_done_callback(leave)
        # Python 3.14 would report the error of a shielded future whose request was cancelled.
        await asyncio.wait([running])
        return running.result()
