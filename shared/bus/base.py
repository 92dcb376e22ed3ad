"""What all buses have in common: the protocols that they implement, and the inbox of a consumer.

The same test suite runs against all implementations.

Delivery is at least once. A delivery that is still unacknowledged when its consumer closes, or when
the connection is lost, is delivered again in its original position at the head of the queue.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, Self, TypeVar

import msgspec

from shared.errors import BusError
from shared.messages import MSGPACK

MAX_MESSAGE_BYTES = 16 << 20
"""Maximum body size in bytes; infra/rabbitmq configures the broker with the same limit."""

MAX_PREFETCH = 65_535
"""The largest prefetch count that AMQP's 16 bits allow."""

DEATH_REASON_HEADER = "x-first-death-reason"
"""Header of dead letters: ``rejected``, ``delivery_limit``, or ``expired``, after the time to live
of the queue or of the message. Warren never gives a message a time to live."""
DEATH_QUEUE_HEADER = "x-first-death-queue"
"""Header of dead letters: the name of the queue they came from."""
_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Exchange:
    """An exchange. All exchanges are durable."""

    name: str
    kind: Literal["direct", "topic", "fanout"]


@dataclass(frozen=True, slots=True)
class Binding:
    exchange: Exchange
    routing_key: str


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue and its properties. Declaring an identical queue again has no effect."""

    name: str
    bindings: tuple[Binding, ...] = ()
    kind: Literal["classic", "quorum"] = "classic"
    is_exclusive: bool = False
    """Usable only by the connection that declared it; deleted when that connection closes."""
    expires_s: float | None = None
    """Seconds without a consumer, a declaration or an inspection after which the queue is
    deleted."""
    max_length: int | None = None
    """Maximum number of messages; further publishes fail with `PublishRefused`."""
    delivery_limit: int | None = None
    """Maximum number of returns; a message returned more often is dead-lettered."""
    ttl_s: float | None = None
    """Seconds after which a message that was not delivered is dead-lettered."""
    dead_letter: Binding | None = None
    """Where rejected, expired and too often returned messages are published."""

    def __post_init__(self) -> None:
        """Reject combinations that no broker supports. Raises ValueError."""
        if self.kind == "classic" and self.delivery_limit is not None:
            raise ValueError(f"queue {self.name!r}: classic queues have no delivery limit")
        if self.kind == "quorum" and self.is_exclusive:
            raise ValueError(f"queue {self.name!r}: quorum queues cannot be exclusive")


def exchanges_of(resource: Exchange | Queue) -> frozenset[Exchange]:
    """The exchanges that a declaration of ``resource`` needs, itself included."""
    if isinstance(resource, Exchange):
        return frozenset({resource})
    bindings = (*resource.bindings, *([resource.dead_letter] if resource.dead_letter else []))
    return frozenset(binding.exchange for binding in bindings)


class Message(msgspec.Struct, frozen=True):
    body: bytes
    content_type: str = MSGPACK
    correlation_id: str = ""
    """The request id, on jobs and on replies."""
    reply_to: str = ""
    """The routing key for replies, which are published to `topology.REPLIES`."""
    headers: Mapping[str, str | int] = {}
    message_id: str = msgspec.field(default_factory=lambda: secrets.token_hex(16))
    """Unique for each publish, even of the same job; returned messages are matched by it."""
    user_id: str = ""
    """The broker's user that published a delivered message; empty if its publisher did not say.
    The broker refuses messages with another user's name. `Bus.publish` sets it."""
    published_at: float = 0.0
    """Unix time that the publisher gave the message; 0 if it gave none."""
    died_at: float = 0.0
    """Unix time of a dead letter's first death; 0 for other messages."""


@dataclass(frozen=True, slots=True)
class QueueState:
    num_ready: int
    """Messages ready for delivery; unacknowledged messages are not counted."""
    num_consumers: int


class Delivery(Protocol):
    """A message held by a consumer until it is acknowledged or rejected."""

    @property
    def message(self) -> Message: ...

    @property
    def num_returns(self) -> int:
        """How often this message was delivered before and returned unacknowledged.

        Exact on quorum queues; 0 or 1 on classic queues.
        """
        ...

    async def ack(self) -> None:
        """Remove the message from its queue. No effect if the consumer is gone: it is
        redelivered."""
        ...

    async def reject(self, *, requeue: bool = False) -> None:
        """Return the message to its queue or dead-letter it. No effect if the consumer is gone."""
        ...


class Consumer(Protocol):
    """An iterator over deliveries in queue order, until its ``async with`` ends.

    Iteration raises `BusUnavailable` when the connection is lost and `QueueNotFound` when the queue
    is deleted. To continue, call `Bus.consume` again.
    """

    def __aiter__(self) -> AsyncIterator[Delivery]: ...

    async def __anext__(self) -> Delivery: ...

    @property
    def is_open(self) -> bool:
        """Whether more deliveries may arrive."""
        ...

    def gather(self, interval_s: float) -> None:
        """Deliver messages up to ``interval_s`` late, so that several of them arrive together and
        this process wakes up less often; 0: as they come, as at the start. A bus may ignore it."""
        ...

    async def stop(self) -> None:
        """Stop accepting deliveries. Unsettled deliveries are kept; iteration ends after them."""
        ...


class Bus(Protocol):
    """A connection to a broker that reconnects by itself. ``async with`` opens and closes it.

    Every call raises `AccessRefused` if the broker's user lacks the permission.
    """

    async def __aenter__(self) -> Self:
        """Return after the first connection attempt, whether or not it succeeded.

        Raises `StartupError` if the broker refuses the login.
        """
        ...

    async def __aexit__(self, *exc_info: object) -> None: ...

    @property
    def user(self) -> str:
        """The broker's user, which every message that is published here names."""
        ...

    @property
    def is_connected(self) -> bool: ...

    @property
    def is_blocked(self) -> bool:
        """Whether the broker reads nothing that is published, because it is short of memory or disk
        space. Publishing raises `PublishersBlocked` then."""
        ...

    @property
    def is_settled(self) -> bool:
        """Whether every client that lost the broker together with this process has had time to
        reconnect."""
        ...

    async def wait_connected(self) -> None:
        """Return once connected."""
        ...

    async def declare(self, *resources: Exchange | Queue) -> None:
        """Create what does not exist yet, including the exchanges of bindings.

        An exclusive queue is declared again after each reconnect, and deleted if this call is
        cancelled or takes too long: no other connection could delete it. Raises `BusUnavailable`,
        `QueueBusy` if the queue is exclusive to another connection, and `BusError` if the name
        exists with other properties.
        """
        ...

    async def declare_again(self, *resources: Exchange | Queue) -> tuple[str, ...]:
        """Declare resources that were declared before, with their bindings, in case an operator has
        removed some of them. Returns the names of the exchanges and queues that were missing.

        A broker does not say whether a binding was missing. Raises as `declare`.
        """
        ...

    async def bind(self, queue: Queue) -> None:
        """Bind a queue that exists, whatever its other properties are. Raises `QueueNotFound` if
        it, or an exchange, does not exist, and `BusUnavailable`."""
        ...

    async def delete_queue(self, name: str) -> None:
        """Delete the queue and its messages, if it exists. Raises `BusUnavailable`, and `QueueDown`
        if that may happen later."""
        ...

    async def inspect(self, queue: str) -> QueueState | None:
        """Return the state of a queue, or None if it does not exist; this renews its expiry.

        Raises `BusUnavailable`, `QueueDown`, and `QueueBusy` if the queue is exclusive to another
        connection.
        """
        ...

    async def publish(self, binding: Binding, message: Message) -> None:
        """Return once the broker has confirmed the message.

        Raises `Unroutable` (no queue is bound), `PublishRefused` (queue full), `MessageTooLarge`,
        `BusUnavailable` or `PublishUnconfirmed`; after either of the last two the message may have
        arrived. Sequential publishes of a caller arrive in order.
        """
        ...

    def consume(
        self, queue: str, *, prefetch: int = 0, is_exclusive: bool = False
    ) -> AbstractAsyncContextManager[Consumer]:
        """Consume ``queue`` with at most ``prefetch`` unacknowledged deliveries (at most
        `MAX_PREFETCH`; 0: unlimited).

        Closing the consumer returns all unacknowledged deliveries in order. Raises `QueueNotFound`,
        `BusUnavailable` and, with ``is_exclusive``, `QueueBusy` while another consumer holds the
        queue. Only classic queues honour ``is_exclusive``.
        """
        ...


class Inbox(Generic[_Item]):
    """The buffer between a consumer's callbacks and the code that iterates over it: items in order,
    followed by the end of the iteration or an error. The first end wins."""

    def __init__(self) -> None:
        self.is_ended = False
        self._items: list[_Item] = []
        self._next: list[_Item] = []
        """Items ahead of the others, in reverse order."""
        self._error: BusError | None = None
        # Lists and a plain future, because every stream has an inbox: a deque takes 3/4 KiB and an
        # Event 1 KiB more.
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: _Item) -> None:
        if not self.is_ended:
            self._items.append(item)
            self._wake()

    def end(self, error: BusError | None = None) -> None:
        """End the iteration after the buffered items, or raise ``error`` there."""
        if not self.is_ended:
            self.is_ended = True
            self._error = error
            self._wake()

    def fail(self, error: BusError) -> None:
        """Drop the buffered items, which the broker will redeliver, and raise ``error``."""
        if not self.is_ended:
            self._items.clear()
            self._next.clear()
        self.end(error)

    async def get(self) -> _Item:
        """Return the next item. Raises StopAsyncIteration or the error at the end.

        Only one task may wait at a time.
        """
        while not self._next:
            if self._items:
                self._next, self._items = self._items[::-1], []
            elif self.is_ended:
                raise self._error or StopAsyncIteration
            else:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
        return self._next.pop()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
