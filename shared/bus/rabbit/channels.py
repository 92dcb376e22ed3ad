"""Channels that are kept open and reused: for publishing, and for the declaration, inspection and
deletion of exchanges and queues."""

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial

from aiormq import Channel
from aiormq.abc import AbstractConnection
from aiormq.exceptions import ChannelInvalidStateError
from pamqp.commands import Channel as ChannelMethods
from pamqp.common import FieldValue

from shared.bus.base import Exchange, Queue, QueueState, exchanges_of
from shared.bus.rabbit.confirms import ConfirmChannel
from shared.bus.rabbit.encoding import AMQP_FAILURES, is_answer, queue_arguments, translated
from shared.bus.rabbit.link import Link, OpenChannel
from shared.errors import BusUnavailable, NoFreeChannel, QueueNotFound
from shared.telemetry import incidents

_MAX_CALLS = 16
_CHANNEL_PATIENCE_S = 5.0
_CHANNEL_PAUSE_S = 0.02
_SUCCESS = 200


async def close_channel(channel: Channel) -> None:
    """Close a channel, however long the broker takes to answer.

    `Channel.close` gives up after a heartbeat and asks again, and for the second time the broker
    ends the connection.
    """
    with suppress(*AMQP_FAILURES):
        await channel.rpc(ChannelMethods.Close(_SUCCESS, "", 0, 0))


async def probe(link: Link) -> None:
    """Return once the broker has answered a call that concerns no queue."""
    await close_channel(await link.open_channel())


class ConfirmChannels:
    """The channels for publishing, used round-robin.

    Any number of publishes can await their confirmations on a channel. There are several channels
    because an error closes a channel with everything in flight on it.
    """

    def __init__(self, link: Link, num_channels: int, timeout_s: float) -> None:
        """``timeout_s`` limits the wait for each confirmation."""
        self._link = link
        self._timeout_s = timeout_s
        self._channels: list[ConfirmChannel | None] = [None] * num_channels
        self._locks = [asyncio.Lock() for _ in range(num_channels)]
        self._turns = itertools.cycle(range(num_channels))

    async def take(self) -> ConfirmChannel:
        """Return an open channel. Raises `BusUnavailable`, also while the broker reads nothing that
        is published because it is short of memory or disk space."""
        await self._link.wait_writable()
        turn = next(self._turns)
        channel = self._channels[turn]
        if channel is not None and not channel.is_closed:
            return channel
        return await self._link.calls.run(self._open(turn), "open a channel")

    async def wait_idle(self, timeout_s: float | None = None) -> None:
        """Return when all calls of the link have ended, and everything is confirmed, or after
        ``timeout_s``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._link.calls.wait_idle()  # one of them may open a channel to publish
                for channel in self._channels:
                    if channel is not None:
                        await channel.wait_idle()

    async def _open(self, turn: int) -> ConfirmChannel:
        async with self._locks[turn]:
            channel = self._channels[turn]
            if channel is None or channel.is_closed:
                opened = await self._link.open_channel(confirms=True)
                self._channels[turn] = channel = ConfirmChannel(opened, self._link, self._timeout_s)
            return channel


class Places:
    """Limits the number of callers that wait for a synchronous call, so that they do not accumulate
    where the broker is silent. A call that its caller has given up has no place any more."""

    def __init__(self, timeout_s: float) -> None:
        """``timeout_s`` limits the wait for a place."""
        self._timeout_s = timeout_s
        self._places = asyncio.Semaphore(_MAX_CALLS)

    @asynccontextmanager
    async def take(self) -> AsyncIterator[None]:
        """Raises `BusUnavailable` if all places are in use for too long."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._places.acquire()
        except TimeoutError:
            raise BusUnavailable("the broker does not answer earlier calls") from None
        try:
            yield
        finally:
            self._places.release()


class CallChannels:
    """The channels for synchronous calls. Each is lent to a single call at a time."""

    def __init__(self, open_channel: OpenChannel) -> None:
        self._open_channel = open_channel
        self._idle: list[Channel] = []

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[Channel]:
        """Lend a channel. After a failed call the channel is closed: an answer that arrives late
        must not be taken for the next call's."""
        channel = await self._take()
        try:
            yield channel
        except BaseException:
            await close_channel(channel)
            raise
        self._idle.append(channel)

    async def _take(self) -> Channel:
        """Take an idle channel, or open a channel. If the connection has no channel left, wait for
        a call to return its channel. Raises `BusUnavailable`."""
        give_up_at = time.monotonic() + _CHANNEL_PATIENCE_S
        while True:
            channel = self._take_idle()
            if channel is not None:
                return channel
            try:
                return await self._open()
            except NoFreeChannel:
                if time.monotonic() > give_up_at:
                    raise
            await asyncio.sleep(_CHANNEL_PAUSE_S)

    async def _open(self) -> Channel:
        channel = await self._open_channel()
        channel.closing.add_done_callback(partial(self._report_end, channel.connection))
        return channel

    def _report_end(self, connection: AbstractConnection, closing: "asyncio.Future[None]") -> None:
        error = None if closing.cancelled() else closing.exception()
        if not (connection.is_closed or is_answer(error)):
            incidents.report("channel", "channel for calls ended", error)

    def _take_idle(self) -> Channel | None:
        while self._idle:
            channel = self._idle.pop()
            if not channel.is_closed:
                return channel
        return None


class Resources:
    """Remembers declared exchanges, so that a request's reply queue costs a single round trip.

    Its calls must be neither cancelled nor timed out: see `shared.bus.rabbit.shielded_calls`.

    The bindings of exclusive queues have an argument that differs between declarations, and no
    other effect. After the queues of a lost node are deleted, RabbitMQ removes their bindings from
    its topic exchanges, and an equal binding that its client has made again by then with them.
    """

    def __init__(self, open_channel: OpenChannel) -> None:
        self._calls = CallChannels(open_channel)
        self._known: set[Exchange] = set()
        self._declaration_ids: dict[str, str] = {}
        """The id of the latest declaration of each exclusive queue, by the queue's name."""

    async def declare_exchange(self, exchange: Exchange) -> None:
        """Create the exchange unless it exists; checking first needs no configure permission."""
        if exchange in self._known:
            return
        with suppress(QueueNotFound):
            await self._declare_exchange(exchange, is_passive=True)
            return
        await self._declare_exchange(exchange, is_passive=False)

    async def declare_queue(self, queue: Queue) -> None:
        try:
            await self._declare_queue(queue)
        except QueueNotFound:  # an exchange was deleted since it was seen
            self._known.clear()
            await self._declare_queue(queue)

    async def _declare_queue(self, queue: Queue) -> None:
        for exchange in exchanges_of(queue):
            await self.declare_exchange(exchange)
        async with self._calls.lend() as channel:
            with translated(f"declare {queue.name}", channel):
                try:
                    await self._send_declaration(channel, queue)
                except ChannelInvalidStateError:
                    await self._raise_reason(channel)
                    raise

    async def declare_again(self, resource: Exchange | Queue) -> tuple[str, ...]:
        """See `Bus.declare_again`."""
        missing = []
        for exchange in exchanges_of(resource):
            try:
                await self._declare_exchange(exchange, is_passive=True)
            except QueueNotFound:
                missing.append(exchange.name)
                self._known.discard(exchange)
                await self.declare_exchange(exchange)
        if isinstance(resource, Queue):
            if await self.inspect(resource.name) is None:
                missing.append(resource.name)
            await self.declare_queue(resource)
        return tuple(missing)

    async def bind_queue(self, queue: Queue) -> None:
        """Bind a queue that exists; raises `QueueNotFound` otherwise."""
        async with self._calls.lend() as channel:
            with translated(f"bind {queue.name}", channel):
                arguments = self._binding_arguments(queue)
                for binding in queue.bindings:
                    exchange, key = binding.exchange.name, binding.routing_key
                    await channel.queue_bind(queue.name, exchange, key, arguments=arguments)

    async def delete_queue(self, name: str) -> None:
        self._declaration_ids.pop(name, None)
        async with self._calls.lend() as channel:
            with translated(f"delete {name}", channel):
                await channel.queue_delete(name)

    async def inspect(self, name: str) -> QueueState | None:
        with suppress(QueueNotFound):
            async with self._calls.lend() as channel:
                with translated(f"inspect {name}", channel):
                    answer = await channel.queue_declare(name, passive=True)
            return QueueState(
                num_ready=answer.message_count or 0, num_consumers=answer.consumer_count or 0
            )
        return None

    async def _declare_exchange(self, exchange: Exchange, *, is_passive: bool) -> None:
        async with self._calls.lend() as channel:
            with translated(f"declare {exchange.name}", channel):
                await channel.exchange_declare(
                    exchange.name,
                    exchange_type=exchange.kind,
                    passive=is_passive,
                    durable=True,
                )
        self._known.add(exchange)

    async def _send_declaration(self, channel: Channel, queue: Queue) -> None:
        """Declare and bind in a single round trip.

        The broker processes a channel in order. The last call, which has no effect of its own, is
        answered once all calls are done, or fails with the error of the failed call.
        """
        await channel.queue_declare(
            queue.name,
            durable=not queue.is_exclusive,
            exclusive=queue.is_exclusive,
            arguments=dict(queue_arguments(queue)),
            nowait=True,
        )
        if queue.is_exclusive:
            self._declaration_ids[queue.name] = secrets.token_hex(8)
        arguments = self._binding_arguments(queue)
        for binding in queue.bindings:
            exchange, key = binding.exchange.name, binding.routing_key
            await channel.queue_bind(queue.name, exchange, key, nowait=True, arguments=arguments)
        await channel.basic_qos()

    def _binding_arguments(self, queue: Queue) -> dict[str, FieldValue] | None:
        declaration_id = self._declaration_ids.get(queue.name)
        return None if declaration_id is None else {"declaration": declaration_id}

    async def _raise_reason(self, channel: Channel) -> None:
        """Raise the error with which the broker closed the channel before the last call was
        sent."""
        await channel.closing
