"""The reply queues of requests, some of them declared before their request comes.

To declare a queue takes the broker longer than all else on a request's way to its first token
(2.7 of 6 ms on two cores), so a few wait ready, each with the id that its request will bear.
"""

import asyncio
import math
import secrets
import time
from collections import defaultdict, deque

from shared import topology
from shared.bus.base import Bus, Queue
from shared.errors import BusError

_NUM_SPARE = 8
_REFILL_PAUSE_S = 0.1
_RETRY_PAUSE_S = 1.0


class ReplyQueues:
    """Gives out request ids and the queues that go with them."""

    def __init__(self, bus: Bus, retention_s: float) -> None:
        self._bus = bus
        self._retention_s = retention_s
        self._spare: defaultdict[str, deque[str]] = defaultdict(deque)
        self._declared_at: dict[str, float] = {}
        """Of those that are spare or were given out and not used yet."""
        self._is_wanted = asyncio.Event()

    def new_id(self, kind: str) -> str:
        """An id ``kind-...`` that cannot be guessed; its queue may be there already."""
        spare = self._spare[kind]
        self._is_wanted.set()
        while spare:
            request_id = spare.popleft()
            if self._is_fresh(request_id):
                return request_id
        return _new_id(kind)

    async def declare(self, request_id: str) -> Queue:
        """The queue of a request, which exists from now on. Raises `BusError`."""
        queue = topology.reply_queue(request_id, self._retention_s)
        if not self._is_fresh(request_id):
            await self._bus.declare(queue)
        self._declared_at.pop(request_id, None)
        return queue

    async def keep_spares(self) -> None:
        """Declare queues ahead, for each kind of id that was ever asked for; never returns."""
        while True:
            await self._is_wanted.wait()
            # Not in the way of the request that has just taken one.
            await asyncio.sleep(_REFILL_PAUSE_S)
            self._is_wanted.clear()
            self._declared_at = {i: t for i, t in self._declared_at.items() if self._is_fresh(i)}
            try:
                for kind, spare in list(self._spare.items()):
                    while len(spare) < _NUM_SPARE:
                        spare.append(await self._declare_spare(kind))
            except BusError:
                await asyncio.sleep(_RETRY_PAUSE_S)
                await self._bus.wait_connected()

    async def _declare_spare(self, kind: str) -> str:
        request_id = _new_id(kind)
        await self._bus.declare(topology.reply_queue(request_id, self._retention_s))
        self._declared_at[request_id] = time.monotonic()
        return request_id

    def _is_fresh(self, request_id: str) -> bool:
        """Whether its queue is there: one without a reader goes after the retention."""
        declared_at = self._declared_at.get(request_id, -math.inf)
        return time.monotonic() - declared_at < self._retention_s / 2


def _new_id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(16)}"
