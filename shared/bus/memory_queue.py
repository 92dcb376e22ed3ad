"""A queue of the in-memory broker: order, redelivery, limits, dead-lettering and its own expiry."""

import asyncio
import heapq
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from shared.bus.base import (
    DEATH_QUEUE_HEADER,
    DEATH_REASON_HEADER,
    Binding,
    Inbox,
    Message,
    Queue,
    QueueState,
)
from shared.errors import BusError, PublishRefused, QueueBusy, QueueNotFound


@dataclass(slots=True, eq=False)
class StoredMessage:
    """A message in its queue. ``position`` is its place in the order and never changes."""

    message: Message
    position: int
    expires_at: float
    num_returns: int = 0


class MemoryDelivery:
    """A `Delivery` of the in-memory broker."""

    __slots__ = ("_consumer", "num_returns", "stored")

    def __init__(self, consumer: "MemoryConsumer", stored: StoredMessage) -> None:
        self._consumer = consumer
        self.stored = stored
        self.num_returns = stored.num_returns

    @property
    def message(self) -> Message:
        return self.stored.message

    async def ack(self) -> None:
        self._consumer.ack(self)

    async def reject(self, *, requeue: bool = False) -> None:
        self._consumer.reject(self, requeue=requeue)


class MemoryConsumer:
    """A `Consumer` of a queue, with its unsettled deliveries."""

    def __init__(self, queue: "MemoryQueue", *, prefetch: int, is_exclusive: bool) -> None:
        self.is_exclusive = is_exclusive
        self.inbox: Inbox[MemoryDelivery] = Inbox()
        self._queue = queue
        self._prefetch = prefetch
        self._unsettled: dict[int, MemoryDelivery] = {}

    def __aiter__(self) -> "MemoryConsumer":
        return self

    async def __anext__(self) -> MemoryDelivery:
        return await self.inbox.get()

    @property
    def is_open(self) -> bool:
        return not self.inbox.is_ended

    def gather(self, interval_s: float) -> None:
        """No effect: a delivery within the process wakes nobody up."""

    async def stop(self) -> None:
        self.detach()
        self.inbox.end()

    def detach(self) -> None:
        """Accept no further deliveries."""
        self._queue.detach(self)

    def close(self, error: BusError) -> None:
        """Return unsettled deliveries to the queue; iteration raises ``error``."""
        self.detach()
        unsettled = [delivery.stored for delivery in self._unsettled.values()]
        self._unsettled.clear()
        self._queue.give_back(unsettled)
        self.inbox.fail(error)

    @property
    def has_room(self) -> bool:
        return not self._prefetch or len(self._unsettled) < self._prefetch

    def take(self, stored: StoredMessage) -> None:
        delivery = MemoryDelivery(self, stored)
        self._unsettled[stored.position] = delivery
        self.inbox.put(delivery)

    def ack(self, delivery: MemoryDelivery) -> None:
        if self._settle(delivery):
            self._queue.dispatch()

    def reject(self, delivery: MemoryDelivery, *, requeue: bool) -> None:
        if not self._settle(delivery):
            return
        if requeue:
            self._queue.give_back([delivery.stored])
        else:
            self._queue.dead_letter(delivery.stored, "rejected")
            self._queue.dispatch()

    def _settle(self, delivery: MemoryDelivery) -> bool:
        """Settle a delivery; False if it was settled before or the consumer is gone."""
        position = delivery.stored.position
        is_unsettled = self._unsettled.get(position) is delivery
        if is_unsettled:
            del self._unsettled[position]
        return is_unsettled


class MemoryQueue:
    """A declared queue. ``dead_letter`` publishes dead letters; ``expire`` deletes the queue."""

    def __init__(
        self,
        declared: Queue,
        owner: object | None,
        dead_letter: Callable[[Binding, Message], None],
        expire: Callable[["MemoryQueue"], None],
    ) -> None:
        self.declared = declared
        self.owner = owner
        """The connection that an exclusive queue belongs to."""
        self._dead_letter = dead_letter
        self._expire = expire
        self._loop = asyncio.get_running_loop()
        self._fresh: deque[StoredMessage] = deque()
        self._returned: list[tuple[int, StoredMessage]] = []  # a heap, ahead of the fresh ones
        self._num_stored = 0
        self._consumers: deque[MemoryConsumer] = deque()
        self._idle_timer: asyncio.TimerHandle | None = None
        self._used_at = 0.0
        self._is_deleted = False
        self.touch()

    @property
    def state(self) -> QueueState:
        return QueueState(num_ready=self._num_ready, num_consumers=len(self._consumers))

    @property
    def _num_ready(self) -> int:
        return len(self._fresh) + len(self._returned)

    def put(self, message: Message) -> None:
        """Store a message. Raises `PublishRefused` when full."""
        limit = self.declared.max_length
        if limit is not None and self._num_ready >= limit:
            raise PublishRefused(f"queue {self.declared.name} is full")
        self._num_stored += 1
        self._fresh.append(StoredMessage(message, self._num_stored, self._expiry()))
        self.dispatch()

    def attach(self, *, prefetch: int, is_exclusive: bool) -> MemoryConsumer:
        """Add a consumer. Raises `QueueBusy` if the queue has a consumer and either is
        exclusive."""
        if self._consumers and (is_exclusive or self._consumers[0].is_exclusive):
            raise QueueBusy(f"another consumer holds queue {self.declared.name}")
        consumer = MemoryConsumer(self, prefetch=prefetch, is_exclusive=is_exclusive)
        self._consumers.append(consumer)
        self.dispatch()
        return consumer

    def detach(self, consumer: MemoryConsumer) -> None:
        if consumer in self._consumers:
            self._consumers.remove(consumer)
            self.touch()

    def give_back(self, returned: list[StoredMessage]) -> None:
        """Return deliveries to their positions; dead-letter deliveries that exceed the delivery
        limit."""
        if self._is_deleted:
            return
        limit = self.declared.delivery_limit
        for stored in returned:
            stored.num_returns += 1
            if limit is not None and stored.num_returns > limit:
                self.dead_letter(stored, "delivery_limit")
            else:
                heapq.heappush(self._returned, (stored.position, stored))
        self.dispatch()

    def dead_letter(self, stored: StoredMessage, reason: str) -> None:
        """Dead-letter a message, or drop it if the queue has no dead-letter exchange."""
        if self.declared.dead_letter is None or self._is_deleted:
            return
        headers = {DEATH_REASON_HEADER: reason, DEATH_QUEUE_HEADER: self.declared.name}
        message = stored.message
        dead = msgspec.structs.replace(
            message,
            headers={**headers, **message.headers},
            died_at=message.died_at or time.time(),
        )
        self._dead_letter(self.declared.dead_letter, dead)

    def dispatch(self) -> None:
        """Deliver messages while consumers have prefetch left."""
        while self._num_ready and self._head().expires_at <= self._loop.time():
            self.dead_letter(self._pop_head(), "expired")
        while self._num_ready and (consumer := self._next_consumer()) is not None:
            consumer.take(self._pop_head())

    def touch(self) -> None:
        """Restart the expiry of the queue, because it was used."""
        expires_s = self.declared.expires_s
        if expires_s is not None:
            self._used_at = self._loop.time()
            if self._idle_timer is None:
                self._idle_timer = self._loop.call_later(expires_s, self._check_idle, expires_s)

    def cut_off(self, error: BusError) -> None:
        """End all consumers with ``error``; unsettled deliveries return."""
        for consumer in list(self._consumers):
            consumer.close(error)

    def close(self) -> None:
        """Delete the queue with its messages and unsettled deliveries."""
        self._is_deleted = True
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        for consumer in self._consumers:
            consumer.inbox.end(QueueNotFound(f"queue {self.declared.name} was deleted"))
        self._consumers.clear()
        self._fresh.clear()
        self._returned.clear()

    def _expiry(self) -> float:
        """When a message that arrives now expires, in the loop's time. It is dead-lettered then."""
        ttl_s = self.declared.ttl_s
        return math.inf if ttl_s is None else self._loop.call_later(ttl_s, self.dispatch).when()

    def _head(self) -> StoredMessage:
        return self._returned[0][1] if self._returned else self._fresh[0]

    def _pop_head(self) -> StoredMessage:
        if self._returned:
            return heapq.heappop(self._returned)[1]
        return self._fresh.popleft()

    def _next_consumer(self) -> MemoryConsumer | None:
        for _ in range(len(self._consumers)):
            consumer = self._consumers[0]
            self._consumers.rotate(-1)
            if consumer.has_room:
                return consumer
        return None

    def _check_idle(self, expires_s: float) -> None:
        self._idle_timer = None
        if self._consumers:
            return
        if self._loop.time() >= self._used_at + expires_s:
            self._expire(self)
        else:
            expires_at = self._used_at + expires_s
            self._idle_timer = self._loop.call_at(expires_at, self._check_idle, expires_s)
