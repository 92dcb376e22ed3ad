"""`RabbitBus`, the implementation of `base.Bus` over RabbitMQ."""

import asyncio
import logging
import random
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Self

from shared.bus.base import MAX_MESSAGE_BYTES, Binding, Exchange, Message, Queue, QueueState
from shared.bus.rabbit.addresses import Address, parse_urls
from shared.bus.rabbit.channel_consumer import RabbitConsumer
from shared.bus.rabbit.channels import ConfirmChannels, Places, Resources, probe
from shared.bus.rabbit.link import DEFAULT_USER, Link, OpenChannel, Restore
from shared.errors import (
    BusError,
    MessageTooLarge,
    QueueBusy,
    QueueSilent,
    StartupError,
    Unanswered,
)
from shared.telemetry import incidents

logger = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 2.0
"""Seconds between two looks at the exclusive queues."""
_MAX_SILENCES = 2
"""So many looks in a row remain without an answer before other nodes are tried. A node with Khepri
that is cut off from the others keeps its clients, and only answers what it can alone."""
_COME_BACK_S = (30.0, 90.0)
"""Between two attempts to return to a node; not the same for all clients of it."""
_CONSUMERS_SHARE = 0.75
"""The share of a connection's channels that consumers may have."""
_CONFIRM_S = 1.0
"""Seconds within which a consumer that was notified of the end of its queue has declared it
again."""


class RabbitBus:
    """Two connections that reconnect by themselves: one for publishing, one for everything else.

    They are separate because a broker that is short of memory stops reading from publishing
    connections, including their acknowledgements. Each consumer has its own channel; when there are
    more than ``max_channels``, further connections are opened.

    Exclusive queues are declared again with each connection. A cluster may delete the exclusive
    queues of a living connection without a notification: if their node was cut off from the other
    nodes, or if they were declared while it still deletes the queues of a dead node
    (rabbitmq-server's issues 9798 and 12597). Other consumers may receive nothing any more, either.
    Therefore all consuming connections are opened again then.

    A publishing connection that had to move to another node returns to its first node some time
    after that node has come back, so that the clients of a cluster stay spread over its nodes. The
    other connections stay, because the messages that their consumers hold would be delivered again.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str = "warren",
        timeout_s: float = 15.0,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        max_channels: int = 1500,
        num_confirm_channels: int = 4,
    ) -> None:
        """``url`` may contain several URLs, separated by commas: the nodes of a cluster.
        ``name`` is the connection name shown to operators; ``timeout_s`` limits every wait for
        an answer of the broker. The default is longer than a dead connection takes to be noticed,
        because a broker whose disk is slow answers late, and callers should not fail for that.

        RabbitMQ allows 2,047 channels on a connection; ``max_channels`` reserves some for calls,
        also for calls that a broker does not answer for a minute because of a lost node.
        Raises `StartupError` if ``url`` is invalid.
        """
        self._urls = parse_urls(url)
        self.user = self._urls[0].user or DEFAULT_USER
        self._name = name
        self._timeout_s = timeout_s
        self._max_message_bytes = max_message_bytes
        self._max_channels = max_channels
        self._publishing = self._link("publish")
        self._num_confirm_channels = num_confirm_channels
        self._confirms = ConfirmChannels(self._publishing, num_confirm_channels, timeout_s)
        self._home = self._link("consume", self._restore)
        """The connection for calls; exclusive queues belong to it."""
        self._consuming = [self._home]
        self._growing = asyncio.Lock()
        self._places = Places(timeout_s)
        self._resources = Resources(partial(self._home.open_channel, waits=False))
        self._exclusive: dict[str, Queue] = {}
        self._consumers: defaultdict[str, list[RabbitConsumer]] = defaultdict(list)
        """The open consumers, by queue."""
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            for link in (self._publishing, self._home):
                await link.open()
                stack.push_async_callback(link.close)
            stack.pop_all()
        works = (self._keep_exclusive, self._come_back)
        self._tasks = [asyncio.create_task(incidents.keep_running(work)) for work in works]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self.wait_idle(self._timeout_s)
        await asyncio.gather(*(link.close() for link in (self._publishing, *self._consuming)))
        await self.wait_idle()

    @property
    def is_connected(self) -> bool:
        return self._publishing.is_connected and self._home.is_connected

    @property
    def is_blocked(self) -> bool:
        return self._publishing.is_blocked

    @property
    def is_settled(self) -> bool:
        return self._publishing.is_settled and self._home.is_settled

    @property
    def server(self) -> dict[str, str]:
        """See `Link.server`."""
        return self._home.server

    async def wait_connected(self) -> None:
        while not self.is_connected:
            await self._publishing.wait_connected()
            await self._home.wait_connected()

    async def wait_idle(self, timeout_s: float | None = None) -> None:
        """Return when no call is in progress, or after ``timeout_s``."""
        await asyncio.gather(
            self._confirms.wait_idle(timeout_s),
            *(link.calls.wait_idle(timeout_s) for link in self._consuming),
        )

    async def declare(self, *resources: Exchange | Queue) -> None:
        for resource in resources:
            is_exclusive = isinstance(resource, Queue) and resource.is_exclusive
            async with self._places.take():
                await self._home.calls.run(
                    self._declare(resource),
                    f"declare {resource.name}",
                    undo=self._delete_queue if is_exclusive else None,
                )

    async def declare_again(self, *resources: Exchange | Queue) -> tuple[str, ...]:
        missing: dict[str, None] = {}
        for resource in resources:
            async with self._places.take():
                doing = f"declare {resource.name} again"
                found = await self._home.calls.run(self._resources.declare_again(resource), doing)
            missing |= dict.fromkeys(found)
        return tuple(missing)

    async def bind(self, queue: Queue) -> None:
        async with self._places.take():
            await self._home.calls.run(
                self._resources.bind_queue(queue),
                f"bind {queue.name}",
                probe=partial(probe, self._home),
            )

    async def delete_queue(self, name: str) -> None:
        async with self._places.take():
            # Otherwise each log of a node that is down would hold a place until the timeout.
            await self._home.calls.run(
                self._delete_queue(name), f"delete {name}", probe=partial(probe, self._home)
            )

    async def inspect(self, queue: str) -> QueueState | None:
        async with self._places.take():
            return await self._inspect(queue)

    async def publish(self, binding: Binding, message: Message) -> None:
        if len(message.body) > self._max_message_bytes:
            raise MessageTooLarge(f"the message has more than {self._max_message_bytes} bytes")
        channel = await self._confirms.take()
        await channel.publish(binding, message, self.user)

    @asynccontextmanager
    async def consume(
        self, queue: str, *, prefetch: int = 0, is_exclusive: bool = False
    ) -> AsyncIterator[RabbitConsumer]:
        consumer = await self._start_consumer(queue, prefetch, is_exclusive)
        self._consumers[queue].append(consumer)
        try:
            yield consumer
        finally:
            self._consumers[queue].remove(consumer)
            if not self._consumers[queue]:
                del self._consumers[queue]
            await consumer.close()

    async def _start_consumer(
        self, queue: str, prefetch: int, is_exclusive: bool
    ) -> RabbitConsumer:
        doing = f"consume {queue}"
        while True:
            link = await self._home.calls.run(self._link_for(queue), doing)
            consumer = await link.calls.run(
                self._consume(link, queue, prefetch, is_exclusive),
                doing,
                undo=_close,
                # A quorum queue without a leader has one soon.
                probe=partial(probe, link) if is_exclusive else None,
            )
            if consumer is not None:
                return consumer

    async def _inspect(self, queue: str) -> QueueState | None:
        inspection = self._resources.inspect(queue)
        return await self._home.calls.run(
            inspection, f"inspect {queue}", probe=partial(probe, self._home)
        )

    async def _declare(self, resource: Exchange | Queue) -> str:
        """Returns its name."""
        if isinstance(resource, Exchange):
            await self._resources.declare_exchange(resource)
        else:
            await self._resources.declare_queue(resource)
            if resource.is_exclusive:
                self._exclusive[resource.name] = resource
        return resource.name

    async def _delete_queue(self, name: str) -> None:
        self._exclusive.pop(name, None)
        consumers = list(self._consumers.get(name, ()))
        for consumer in consumers:
            consumer.is_deleted = True
        try:
            await self._resources.delete_queue(name)
        except BusError:
            for consumer in consumers:
                consumer.is_deleted = False
            raise

    async def _consume(
        self, link: Link, queue: str, prefetch: int, is_exclusive: bool
    ) -> RabbitConsumer | None:
        """Returns None if the connection has no more room: any number of consumers may have chosen
        it before a consumer had a channel."""
        if not self._has_room(link, queue):
            return None
        channel = await link.open_channel()
        consumer = RabbitConsumer(channel, queue, self._inspect, link)
        try:
            await consumer.start(prefetch=prefetch, is_exclusive=is_exclusive)
        except BaseException:
            await consumer.close()
            raise
        return consumer

    def _link(
        self, purpose: str, restore: Restore | None = None, first: Address | None = None
    ) -> Link:
        name = f"{self._name} {purpose}"
        return Link(self._urls, name=name, timeout_s=self._timeout_s, restore=restore, first=first)

    async def _restore(self, open_channel: OpenChannel) -> None:
        resources = Resources(open_channel)
        for queue in list(self._exclusive.values()):
            # The last connection may still have it, until the broker notices that its node is gone.
            with suppress(QueueBusy):
                await resources.declare_queue(queue)
        self._resources = resources

    async def _keep_exclusive(self) -> None:
        """Look at the exclusive queues, and open all connections again when the broker has lost a
        queue or does not answer, until cancelled."""
        num_silences = 0
        while True:
            await asyncio.sleep(_LOOK_INTERVAL_S)
            try:
                await self._look()
                num_silences = 0
            except (Unanswered, QueueSilent) as error:
                num_silences += 1
                if num_silences >= _MAX_SILENCES and self._home.has_several_addresses:
                    num_silences = 0
                    incidents.report("connection", "broker node does not answer", error)
                    await self._reopen(self._publishing, *self._consuming, is_silent=True)

    async def _look(self) -> None:
        """Bind the exclusive queues again, whose bindings may be lost without them. Raises
        `Unanswered` and `QueueSilent`."""
        for queue in list(self._exclusive.values()):
            try:
                if await self._is_lost(queue.name):
                    incidents.report("channel", "own queue lost", None, queue=queue.name)
                    await self._reopen(*self._consuming)
                    break
                binding = self._resources.bind_queue(queue)
                await self._home.calls.run(binding, f"bind {queue.name}")
            except (Unanswered, QueueSilent):
                raise
            except BusError:
                continue

    async def _come_back(self) -> None:
        """Let publishing return to its first node after that has come back, until cancelled."""
        while True:
            await asyncio.sleep(random.uniform(*_COME_BACK_S))  # noqa: S311
            home = await self._publishing.find_home()
            if home is not None:
                await self._publish_to(home)

    async def _publish_to(self, address: Address) -> None:
        """Publish over a new connection to ``address``, if it can be opened. Messages in flight on
        the old connection are confirmed there."""
        link = self._link("publish", first=address)
        try:
            await link.open()
        except StartupError:
            return None
        # A publish that waits for the old connection to come back would not notice the new
        # connection.
        if not (link.is_connected_to(address) and self._publishing.is_connected):
            return await link.close()
        old, self._publishing = self._publishing, link
        published = self._confirms
        self._confirms = ConfirmChannels(link, self._num_confirm_channels, self._timeout_s)
        logger.info("publishing over the first node again", extra={"broker": str(address)})
        try:
            await published.wait_idle(self._timeout_s)
        finally:
            await old.close()

    async def _reopen(self, *links: Link, is_silent: bool = False) -> None:
        await asyncio.gather(*(link.reopen(is_silent=is_silent) for link in links))

    async def _is_lost(self, name: str) -> bool:
        """Whether an exclusive queue is gone, and no consumer was notified that would declare it
        again. Raises `BusError`."""
        if await self._inspect(name) is not None:
            return False
        await asyncio.sleep(_CONFIRM_S)
        return name in self._exclusive and await self._inspect(name) is None

    async def _link_for(self, queue: str) -> Link:
        """Return a connection with room for another consumer."""
        if queue in self._exclusive:
            return self._home
        async with self._growing:
            for link in self._consuming:
                if self._has_room(link, queue):
                    return link
            link = self._link(f"consume {len(self._consuming) + 1}")
            await link.open()
            self._consuming.append(link)
            return link

    def _has_room(self, link: Link, queue: str) -> bool:
        # Calls need channels, too.
        most = min(self._max_channels, max(1, int(link.max_channels * _CONSUMERS_SHARE)))
        return queue in self._exclusive or link.num_channels < most


async def _close(consumer: RabbitConsumer | None) -> None:
    if consumer is not None:
        await consumer.close()
