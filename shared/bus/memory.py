"""The in-process bus of ``warren serve``: a broker with the guarantees of `base`.

Publishing routes and delivers within the call, without tasks or copies, in a few microseconds per
message. A broker belongs to one event loop.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

import msgspec

from shared.bus.base import (
    MAX_MESSAGE_BYTES,
    Binding,
    Exchange,
    Message,
    Queue,
    QueueState,
    exchanges_of,
)
from shared.bus.memory_exchange import MemoryExchange
from shared.bus.memory_queue import MemoryConsumer, MemoryQueue
from shared.errors import (
    BusError,
    BusUnavailable,
    MessageTooLarge,
    PublishRefused,
    QueueBusy,
    QueueDown,
    QueueNotFound,
    Unroutable,
)

logger = logging.getLogger(__name__)

_RECONNECT_S = 0.01


class MemoryBroker:
    """Exchanges and queues, shared by any number of `MemoryBus` connections."""

    def __init__(self) -> None:
        self._exchanges: dict[str, MemoryExchange] = {}
        self._queues: dict[str, MemoryQueue] = {}
        self._down: dict[str, MemoryQueue] = {}

    def take_down(self, name: str) -> None:
        """Lose a queue as a cluster does whose node dies: it is unreachable, under a name that
        stays taken."""
        queue = self._queues.pop(name)
        self._down[name] = queue
        self._unbind(queue)
        queue.cut_off(QueueDown(f"the node of queue {name} is down"))

    def bring_back(self, name: str) -> None:
        """Let the node of a queue return, with all messages."""
        queue = self._down.pop(name)
        self._queues[name] = queue
        for binding in queue.declared.bindings:
            self.declare_exchange(binding.exchange).bind(binding.routing_key, queue)
        queue.touch()

    @property
    def bindings(self) -> set[tuple[str, str, str]]:
        """All bindings: exchange, routing key and queue."""
        return {
            (exchange.declared.name, key, name)
            for exchange in self._exchanges.values()
            for key, name in exchange.bindings
        }

    def unbind(self, name: str) -> None:
        """Remove all bindings of a queue, as an operator can."""
        self._unbind(self._queues[name])

    def delete_exchange(self, name: str) -> None:
        """Delete an exchange with its bindings, as an operator can."""
        del self._exchanges[name]

    def has(self, resource: Exchange | Queue) -> bool:
        names = self._exchanges if isinstance(resource, Exchange) else self._queues
        return resource.name in names

    def declare_exchange(self, declared: Exchange) -> MemoryExchange:
        exchange = self._exchanges.setdefault(declared.name, MemoryExchange(declared))
        if exchange.declared != declared:
            raise BusError(f"exchange {declared.name} exists with other properties")
        return exchange

    def declare_queue(self, declared: Queue, bus: "MemoryBus") -> None:
        existing = self.find(declared.name, bus)
        if existing is not None and existing.declared != declared:
            raise BusError(f"queue {declared.name} exists with other properties")
        if declared.dead_letter is not None:
            self.declare_exchange(declared.dead_letter.exchange)
        exchanges = [self.declare_exchange(binding.exchange) for binding in declared.bindings]
        owner = bus if declared.is_exclusive else None
        queue = existing or MemoryQueue(declared, owner, self._dead_letter, self._expire)
        self._queues[declared.name] = queue
        for exchange, binding in zip(exchanges, declared.bindings, strict=True):
            exchange.bind(binding.routing_key, queue)
        queue.touch()

    def bind(self, declared: Queue, bus: "MemoryBus") -> None:
        """Bind a queue. Raises `QueueNotFound` if it, or an exchange, does not exist."""
        queue = self.find(declared.name, bus)
        for binding in declared.bindings:
            exchange = self._exchanges.get(binding.exchange.name)
            if queue is None or exchange is None:
                raise QueueNotFound(f"no queue {declared.name} or exchange {binding.exchange.name}")
            exchange.bind(binding.routing_key, queue)

    def find(self, name: str, bus: "MemoryBus") -> MemoryQueue | None:
        """Find the queue of that name. Raises `QueueBusy` if it is exclusive to another
        connection, and `QueueDown`."""
        if name in self._down:
            raise QueueDown(f"the node of queue {name} is down")
        queue = self._queues.get(name)
        if queue is not None and queue.owner not in (None, bus):
            raise QueueBusy(f"queue {name} belongs to another connection")
        return queue

    def publish(self, binding: Binding, message: Message) -> None:
        """Store a message in every queue bound to its key.

        Raises `Unroutable` without such a queue, and `PublishRefused` if a queue is full; the other
        queues have stored the message even then.
        """
        exchange = self._exchanges.get(binding.exchange.name)
        queues = exchange.route(binding.routing_key) if exchange is not None else []
        if not queues:
            raise Unroutable(f"no queue at {binding.exchange.name} for {binding.routing_key}")
        refusals = [refusal for queue in queues if (refusal := _refusal(queue, message))]
        if refusals:
            raise refusals[0]

    def delete(self, name: str, bus: "MemoryBus") -> None:
        queue = self.find(name, bus)
        if queue is not None:
            self._delete(queue)

    def drop(self, bus: "MemoryBus") -> None:
        """Remove a closed connection's exclusive queues."""
        for queue in [queue for queue in self._queues.values() if queue.owner is bus]:
            self._delete(queue)

    def _expire(self, queue: MemoryQueue) -> None:
        if queue.declared.name not in self._down:  # otherwise its expiry begins again with its node
            self._delete(queue)

    def _delete(self, queue: MemoryQueue) -> None:
        del self._queues[queue.declared.name]
        self._unbind(queue)
        queue.close()

    def _unbind(self, queue: MemoryQueue) -> None:
        for binding in queue.declared.bindings:
            if (exchange := self._exchanges.get(binding.exchange.name)) is not None:
                exchange.unbind(binding.routing_key, queue)

    def _dead_letter(self, binding: Binding, message: Message) -> None:
        try:
            self.publish(binding, message)
        except (Unroutable, PublishRefused) as error:
            logger.warning("dead letter dropped", extra={"reason": error.message})


def _refusal(queue: MemoryQueue, message: Message) -> PublishRefused | None:
    try:
        queue.put(message)
    except PublishRefused as refusal:
        return refusal
    return None


class MemoryBus:
    """A connection to a `MemoryBroker`, by default to a new broker."""

    is_blocked = False
    """Nothing blocks the publishers of this bus."""

    def __init__(
        self,
        broker: MemoryBroker | None = None,
        *,
        user: str = "operator",
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self.user = user
        self._broker = broker or MemoryBroker()
        self._max_message_bytes = max_message_bytes
        self._connected = asyncio.Event()
        self._reconnecting: asyncio.TimerHandle | None = None
        self._exclusive: dict[str, Queue] = {}
        self._consumers: set[MemoryConsumer] = set()

    async def __aenter__(self) -> Self:
        self._connected.set()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._disconnect()

    @property
    def is_connected(self) -> bool:
        return self._connected.is_set()

    @property
    def is_settled(self) -> bool:
        return self.is_connected

    async def wait_connected(self) -> None:
        await self._connected.wait()

    def sever(self, for_s: float = _RECONNECT_S) -> None:
        """Close the connection as a broker would; it reconnects by itself after ``for_s``
        seconds."""
        self._disconnect()
        loop = asyncio.get_running_loop()
        self._reconnecting = loop.call_later(for_s, self._reconnect)

    async def declare(self, *resources: Exchange | Queue) -> None:
        self._require_connection()
        for resource in resources:
            if isinstance(resource, Exchange):
                self._broker.declare_exchange(resource)
                continue
            self._broker.declare_queue(resource, self)
            if resource.is_exclusive:
                self._exclusive[resource.name] = resource

    async def declare_again(self, *resources: Exchange | Queue) -> tuple[str, ...]:
        self._require_connection()
        exchanges = {exchange for one in resources for exchange in exchanges_of(one)}
        missing = [one.name for one in {*exchanges, *resources} if not self._broker.has(one)]
        await self.declare(*resources)
        return tuple(missing)

    async def bind(self, queue: Queue) -> None:
        self._require_connection()
        self._broker.bind(queue, self)

    async def delete_queue(self, name: str) -> None:
        self._require_connection()
        self._broker.delete(name, self)
        self._exclusive.pop(name, None)

    async def inspect(self, queue: str) -> QueueState | None:
        self._require_connection()
        found = self._broker.find(queue, self)
        if found is None:
            return None
        found.touch()
        return found.state

    async def publish(self, binding: Binding, message: Message) -> None:
        if len(message.body) > self._max_message_bytes:
            raise MessageTooLarge(f"the message has more than {self._max_message_bytes} bytes")
        self._require_connection()
        self._broker.publish(binding, msgspec.structs.replace(message, user_id=self.user))

    @asynccontextmanager
    async def consume(
        self, queue: str, *, prefetch: int = 0, is_exclusive: bool = False
    ) -> AsyncIterator[MemoryConsumer]:
        self._require_connection()
        found = self._broker.find(queue, self)
        if found is None:
            raise QueueNotFound(f"no queue {queue}")
        consumer = found.attach(prefetch=prefetch, is_exclusive=is_exclusive)
        self._consumers.add(consumer)
        try:
            yield consumer
        finally:
            self._consumers.discard(consumer)
            consumer.close(BusUnavailable("the consumer is closed"))

    def _require_connection(self) -> None:
        if not self._connected.is_set():
            raise BusUnavailable("not connected to the broker")

    def _disconnect(self) -> None:
        self._connected.clear()
        if self._reconnecting is not None:
            self._reconnecting.cancel()
        # Detach all of them first, so that messages returned by one do not go to the next.
        for consumer in self._consumers:
            consumer.detach()
        for consumer in self._consumers:
            consumer.close(BusUnavailable("the connection to the broker was lost"))
        self._consumers.clear()
        self._broker.drop(self)

    def _reconnect(self) -> None:
        for queue in self._exclusive.values():
            self._broker.declare_queue(queue, self)
        self._connected.set()
