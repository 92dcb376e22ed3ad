"""The reply queues of requests; some are declared and consumed in advance.

A log whose broker node dies is recreated in another queue: see `shared.log`.

Declaring and consuming a queue takes the broker longer than everything else before a request's
first token. A few spare queues are therefore kept ready, each with the id of a future request. A
spare queue is kept alive by its consumer, because the broker deletes only unread queues.
"""

import asyncio
import secrets
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from dataclasses import replace

from shared import topology
from shared.bus import retry
from shared.bus.base import Bus, Consumer, Queue
from shared.errors import BusError, BusUnavailable, QueueNotFound
from shared.telemetry import incidents

_NUM_SPARE = 8
_REFILL_PAUSE_S = 0.1
_RETRY_PAUSE_S = 1.0
_MAX_DECLARATIONS = 3


class ReplyLog:
    """The reply queue of a request, and its consumer, if it already has a consumer."""

    def __init__(
        self, bus: Bus, request_id: str, retention_s: float, *, may_exist: bool = False
    ) -> None:
        """``may_exist``: whether an earlier request may have had the same id."""
        self.request_id = request_id
        self.queue: Queue = topology.reply_queue(request_id, retention_s)
        self.is_used = False
        """Whether a request uses it, which closes it."""
        self._bus = bus
        self._may_exist = may_exist
        self._consuming: AbstractAsyncContextManager[Consumer] | None = None
        self._consumer: Consumer | None = None

    @property
    def is_renewed(self) -> bool:
        """Whether it is a log that was recreated."""
        return self.queue.name != topology.first_log(self.queue.name)

    @property
    def is_attached(self) -> bool:
        return self._consumer is not None and self._consumer.is_open

    def renewed(self) -> "ReplyLog":
        """The log of the same request, which may be declared again."""
        retention_s = self.queue.expires_s or 0.0
        return ReplyLog(self._bus, self.request_id, retention_s, may_exist=True)

    def move_on(self) -> None:
        """Continue in another queue, which is to be declared."""
        later = topology.later_log(self.queue.name)
        assert later is not None, "gateways read logs of gateways only"
        binding = topology.reply_binding(later)
        self.queue = replace(self.queue, name=later, bindings=(binding,))

    async def find(self) -> None:
        """Move on to the newest queue in which the log was recreated. Raises `BusUnavailable`."""
        while await topology.find_later_log(self._bus, self.queue.name) is not None:
            self.move_on()

    async def delete(self) -> None:
        """Delete the log, as far as its nodes live. Raises `BusUnavailable`."""
        await self._bus.delete_queue(self.queue.name)
        earlier: str | None = topology.first_log(self.queue.name)
        while earlier is not None and earlier != self.queue.name:
            with suppress(BusError):
                await self._bus.delete_queue(earlier)
            earlier = topology.later_log(earlier)

    async def declare(self) -> None:
        """Declare the queue, unless it is consumed already. Raises `BusError`."""
        if self._may_exist:
            await self.find()
            await self._declare_again()
        elif not self.is_attached:
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

    async def _declare_again(self) -> None:
        """Declare a log that may exist, and may be deleted at any moment by the end of an earlier
        request with its id. Raises `BusError`."""
        for num_left in reversed(range(_MAX_DECLARATIONS)):
            try:
                # The queue is declared even if it exists, because its declaration may have been
                # interrupted before the queue was bound.
                return await self._bus.declare(self.queue)
            except BusUnavailable:
                raise
            except BusError as error:
                # A queue cannot be declared again with another expiry, which may be the cause.
                is_unbound = isinstance(error, QueueNotFound)
                if not is_unbound and await self._bus.inspect(self.queue.name) is not None:
                    return None
                if not num_left:
                    raise
        return None


class ReplyQueues:
    """Provides requests with ids and with the logs that belong to them."""

    def __init__(self, bus: Bus, retention_s: float) -> None:
        self._bus = bus
        self._retention_s = retention_s
        self._spare: defaultdict[str, deque[ReplyLog]] = defaultdict(deque)
        self._stale: list[ReplyLog] = []
        """Spare logs that were lost with their connection."""
        self._is_wanted = asyncio.Event()

    @contextmanager
    def take(self, prefix: str) -> Iterator[ReplyLog]:
        """The log of a new request, whose unguessable id begins with ``prefix``. If it is not used
        it becomes spare again."""
        self._is_wanted.set()
        spare = self._spare[prefix]
        log = None
        while spare and log is None:
            candidate = spare.popleft()
            if candidate.is_attached:
                log = candidate
            else:
                self._stale.append(candidate)
        log = log or ReplyLog(self._bus, new_id(prefix), self._retention_s)
        try:
            yield log
        finally:
            if log.is_attached and not log.is_used:
                spare.append(log)

    def named(
        self, request_id: str, retention_s: float = 0.0, *, may_exist: bool = False
    ) -> ReplyLog:
        """The log of a request with a given id. It lasts ``retention_s``, or the default retention,
        without a reader."""
        retention_s = max(retention_s, self._retention_s)
        return ReplyLog(self._bus, request_id, retention_s, may_exist=may_exist)

    @property
    def spare(self) -> list[Queue]:
        """The queues of future requests."""
        return [log.queue for logs in self._spare.values() for log in logs]

    async def keep_spares(self) -> None:
        """Keep spare logs ready for each prefix that was ever requested; never returns."""
        try:
            while True:
                await self._is_wanted.wait()
                # Wait, so that the refill does not delay the request that has just taken a spare
                # log and is being published.
                await asyncio.sleep(_REFILL_PAUSE_S)
                self._is_wanted.clear()
                await self._close_stale()
                try:
                    await self._refill()
                except BusError:
                    self._is_wanted.set()
                    await retry.pause(self._bus, _RETRY_PAUSE_S)
        finally:
            self._is_wanted.set()  # for the caller that restarts this
            for spare in self._spare.values():
                while spare:
                    with incidents.survived("task", "log not closed"):
                        await spare.popleft().close()

    async def _refill(self) -> None:
        for prefix, spare in list(self._spare.items()):
            while len(spare) < _NUM_SPARE:
                log = ReplyLog(self._bus, new_id(prefix), self._retention_s)
                await log.declare()
                await log.attach()
                spare.append(log)

    async def _close_stale(self) -> None:
        while self._stale:
            with incidents.survived("task", "log not closed"):
                await self._stale.pop().close()


def new_id(prefix: str) -> str:
    """An unguessable id that begins with ``prefix``."""
    return f"{prefix}{secrets.token_hex(16)}"
