"""The protocols every bus implements. What is promised stands here and is tested once for all.

A bus promises at-least-once delivery: a delivery that is not acknowledged when its consumer closes,
or when the connection is lost, is delivered again, in its old place at the head of the queue.
"""

import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Literal, Protocol, Self

import msgspec

from shared.messages import MSGPACK

MAX_MESSAGE_BYTES = 16 << 20
"""Longest body; infra/rabbitmq sets the broker's own limit to the same."""

MAX_PREFETCH = 65_535
"""AMQP counts in 16 bits."""

DEATH_REASON_HEADER = "x-first-death-reason"
"""On dead letters: ``rejected``, ``expired`` or ``delivery_limit``."""
DEATH_QUEUE_HEADER = "x-first-death-queue"
"""On dead letters: the queue they died in."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A place to publish to. All exchanges are durable."""

    name: str
    kind: Literal["direct", "topic", "fanout"]


@dataclass(frozen=True, slots=True)
class Binding:
    exchange: Exchange
    routing_key: str


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue and what it promises; equal declarations are idempotent."""

    name: str
    bindings: tuple[Binding, ...] = ()
    kind: Literal["classic", "quorum"] = "classic"
    is_exclusive: bool = False
    """Seen by the declaring connection alone and gone with it."""
    expires_s: float | None = None
    """Deleted after so long without a consumer, a declaration or an inspection."""
    max_length: int | None = None
    """More messages than this are refused with `PublishRefused`."""
    delivery_limit: int | None = None
    """A message returned more often than this goes to the dead-letter exchange."""
    dead_letter: Binding | None = None
    """Where rejected, expired and too often returned messages go."""

    def __post_init__(self) -> None:
        """Refuse what no broker can promise. Raises ValueError."""
        if self.kind == "classic" and self.delivery_limit is not None:
            raise ValueError(f"queue {self.name!r}: classic queues have no delivery limit")
        if self.kind == "quorum" and self.is_exclusive:
            raise ValueError(f"queue {self.name!r}: quorum queues cannot be exclusive")


class Message(msgspec.Struct, frozen=True):
    body: bytes
    content_type: str = MSGPACK
    correlation_id: str = ""
    """The request id, in both directions."""
    reply_to: str = ""
    """The routing key under which the answer is published to `topology.REPLIES`."""
    expires_s: float | None = None
    """Dead-lettered when it reaches the head of its queue later than this."""
    headers: Mapping[str, str | int] = {}
    message_id: str = msgspec.field(default_factory=lambda: secrets.token_hex(16))
    """Unique for each publish, also of the same job: brokers match returns by it."""


@dataclass(frozen=True, slots=True)
class QueueState:
    num_ready: int
    """Messages waiting; those delivered and not yet acknowledged are not counted."""
    num_consumers: int


class Delivery(Protocol):
    """A message in a consumer's hands until it is acknowledged or rejected."""

    @property
    def message(self) -> Message: ...

    @property
    def num_returns(self) -> int:
        """How often this message was delivered before and came back unacknowledged. Exact on
        quorum queues; 0 or 1 on classic ones."""
        ...

    async def ack(self) -> None:
        """Remove the message. Does nothing when the consumer is gone: it comes again then."""
        ...

    async def reject(self, *, requeue: bool = False) -> None:
        """Return the message to its queue, or dead-letter it; nothing when the consumer is gone."""
        ...


class Consumer(Protocol):
    """Deliveries in the queue's order, until the ``async with`` that made it ends.

    Iteration raises `BusUnavailable` when the connection is lost and `QueueNotFound` when the queue
    is deleted; whoever wants more consumes again.
    """

    def __aiter__(self) -> AsyncIterator[Delivery]: ...

    async def __anext__(self) -> Delivery: ...

    @property
    def is_open(self) -> bool:
        """Whether further deliveries may come."""
        ...

    async def stop(self) -> None:
        """Take no further deliveries; those in hand stay in hand. Iteration ends after them."""
        ...


class Bus(Protocol):
    """A connection to a broker, which restores itself. ``async with`` opens and closes it.

    Any call raises `AccessRefused` where the broker's user lacks the permission.
    """

    async def __aenter__(self) -> Self:
        """Return after the first attempt to connect, whether or not the broker was there.

        Raises `StartupError` where the broker refuses the login.
        """
        ...

    async def __aexit__(self, *exc_info: object) -> None: ...

    @property
    def is_connected(self) -> bool: ...

    @property
    def is_settled(self) -> bool:
        """Whether all who lost the broker when this process did have had time to come back."""
        ...

    async def wait_connected(self) -> None:
        """Return once there is a connection; at once if there is one."""
        ...

    async def declare(self, *resources: Exchange | Queue) -> None:
        """Create what does not exist yet, exchanges of bindings included.

        An exclusive queue is declared anew after each reconnect, without being asked. Raises
        `BusUnavailable`, `QueueBusy` for another connection's exclusive queue, and `BusError` where
        the name is taken by something with other properties.
        """
        ...

    async def delete_queue(self, name: str) -> None:
        """Delete the queue with what it holds, if it exists. Raises `BusUnavailable`."""
        ...

    async def inspect(self, queue: str) -> QueueState | None:
        """The state of a queue or None; renews its expiry. Raises `BusUnavailable`, and
        `QueueBusy` for another connection's exclusive queue."""
        ...

    async def publish(self, binding: Binding, message: Message) -> None:
        """Return once the broker has taken responsibility for the message.

        Raises `Unroutable` (no queue there), `PublishRefused` (queue full), `MessageTooLarge`,
        `BusUnavailable` or `PublishUnconfirmed`; after the last two the message may have arrived
        all the same. Publishes of one caller, each awaited, arrive in order.
        """
        ...

    def consume(
        self, queue: str, *, prefetch: int = 0, is_exclusive: bool = False
    ) -> AbstractAsyncContextManager[Consumer]:
        """Consume ``queue``, holding at most ``prefetch`` unacknowledged deliveries (at most
        `MAX_PREFETCH`; 0: no bound).

        Closing gives all unacknowledged deliveries back in order. Raises `QueueNotFound`,
        `BusUnavailable`, and with ``is_exclusive`` `QueueBusy` while another consumer holds it.
        Only classic queues keep to ``is_exclusive``.
        """
        ...
