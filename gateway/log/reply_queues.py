"""The reply queues of requests; some are declared and consumed in advance.

Declaring and consuming a queue takes the broker longer than everything else before a request's
first token. A few spare queues are therefore kept ready, each with the id of a future request. A
spare queue is kept alive by its consumer, because the broker deletes only unread queues.
"""

import asyncio
import secrets
import time
from collections import defaultdict, deque
from contextlib import AbstractAsyncContextManager

from shared import incidents, topology
from shared.bus.base import Bus, Consumer, Queue
from shared.errors import BusError, BusUnavailable, QueueNotFound

_NUM_SPARE = 8
_REFILL_PAUSE_S = 0.1
_RETRY_PAUSE_S = 1.0
_MAX_DECLARATIONS = 3


class ReplyLog:
    """The reply queue of one request, and its consumer, if it already has one."""

    def __init__(self, bus: Bus, request_id: str, retention_s: float) -> None:
        self.request_id = request_id
        self.queue: Queue = topology.reply_queue(request_id, retention_s)
        self.given_at = 0.0
        self._bus = bus
        self._consuming: AbstractAsyncContextManager[Consumer] | None = None
        self._consumer: Consumer | None = None

    @property
    def is_attached(self) -> bool:
        return self._consumer is not None and self._consumer.is_open

    async def declare(self) -> None:
        """Declare the queue. Raises `BusError`."""
        await self._bus.declare(self.queue)

    async def attach(self) -> Consumer:
        """Consume the log from its start, or continue with a spare's consumer. Raises as
        `Bus.consume`."""
        if self._consumer is None:
            consuming = self._bus.consume(self.queue.name, is_exclusive=True)
            self._consumer = await consuming.__aenter__()
            self._consuming = consuming
        return self._consumer

    async def close(self) -> None:
        """Release the log, unless that was done before."""
        consuming, self._consuming, self._consumer = self._consuming, None, None
        if consuming is not None:
            await consuming.__aexit__(None, None, None)


class ReplyQueues:
    """Assigns request ids and the logs that belong to them."""

    def __init__(self, bus: Bus, retention_s: float, unused_s: float = 5.0) -> None:
        """``unused_s``: seconds after which an unused id is assumed to belong to a rejected
        request."""
        self._bus = bus
        self._retention_s = retention_s
        self._unused_s = unused_s
        self._spare: defaultdict[str, deque[ReplyLog]] = defaultdict(deque)
        self._given: dict[str, ReplyLog] = {}
        """Logs whose ids were assigned but not used yet."""
        self._is_wanted = asyncio.Event()

    def new_id(self, kind: str, *, lasts: bool = False) -> str:
        """An unguessable id ``kind-...``. Its log may exist already, unless it must last longer
        than others without a reader."""
        if lasts:
            return _new_id(kind)
        self._is_wanted.set()
        spare = self._spare[kind]
        while spare:
            log = spare.popleft()
            log.given_at = time.monotonic()
            self._given[log.request_id] = log
            if log.is_attached:
                return log.request_id
        return _new_id(kind)

    async def take(
        self, request_id: str, retention_s: float = 0.0, *, may_exist: bool = False
    ) -> ReplyLog:
        """Take the log of a request. Its queue exists from now on, and lasts ``retention_s``, or
        the default retention, without a reader. Raises `BusError`.

        The caller closes it.
        """
        log = self._given.pop(request_id, None)
        if log is None:
            log = ReplyLog(self._bus, request_id, max(retention_s, self._retention_s))
            if may_exist:
                await self._declare_again(log)
            else:
                await log.declare()
        return log

    def find(self, request_id: str) -> ReplyLog:
        """The log of a request that was declared elsewhere."""
        return ReplyLog(self._bus, request_id, self._retention_s)

    async def keep_spares(self) -> None:
        """Keep spare logs ready for each kind of id that was ever requested; never returns."""
        try:
            while True:
                await self._is_wanted.wait()
                # Not while the request that has just taken one is being published.
                await asyncio.sleep(_REFILL_PAUSE_S)
                self._is_wanted.clear()
                await self._close_unused()
                try:
                    await self._refill()
                except BusError:
                    self._is_wanted.set()
                    await asyncio.sleep(_RETRY_PAUSE_S)
                    await self._bus.wait_connected()
        finally:
            self._is_wanted.set()  # for the caller that restarts this
            for spare in self._spare.values():
                while spare:
                    with incidents.survived("task", "log not closed"):
                        await spare.popleft().close()

    async def _declare_again(self, log: ReplyLog) -> None:
        """Declare a log that may exist, and may be deleted at any moment by the end of an earlier
        request with its id. Raises `BusError`."""
        for num_left in reversed(range(_MAX_DECLARATIONS)):
            try:
                # Even if it exists: its declaration may have been interrupted before it was bound.
                return await log.declare()
            except BusUnavailable:
                raise
            except BusError as error:
                # A queue cannot be declared again with another expiry, which may be the cause.
                is_unbound = isinstance(error, QueueNotFound)
                if not is_unbound and await self._bus.inspect(log.queue.name) is not None:
                    return None
                if not num_left:
                    raise
        return None

    async def _refill(self) -> None:
        for kind, spare in list(self._spare.items()):
            while len(spare) < _NUM_SPARE:
                log = ReplyLog(self._bus, _new_id(kind), self._retention_s)
                await log.declare()
                await log.attach()
                spare.append(log)

    async def _close_unused(self) -> None:
        unused_since = time.monotonic() - self._unused_s
        unused = [log for log in self._given.values() if log.given_at < unused_since]
        for log in unused:
            del self._given[log.request_id]
        for log in unused:
            with incidents.survived("task", "log not closed", request_id=log.request_id):
                await log.close()


def _new_id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(16)}"
