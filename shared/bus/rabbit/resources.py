"""Declaration, inspection and deletion of exchanges and queues over one connection."""

from contextlib import suppress

from aiormq import Channel
from aiormq.exceptions import ChannelInvalidStateError

from shared.bus.base import Exchange, Queue, QueueState
from shared.bus.rabbit.channels import CallChannels
from shared.bus.rabbit.encoding import queue_arguments
from shared.bus.rabbit.failures import translated
from shared.bus.rabbit.link import OpenChannel
from shared.errors import QueueNotFound


class Resources:
    """Remembers declared exchanges, so that a request's reply queue costs one round trip.

    Its calls must be neither cancelled nor timed out: see `shared.bus.rabbit.shielded_calls`.
    """

    def __init__(self, open_channel: OpenChannel, timeout_s: float) -> None:
        """``timeout_s`` limits the wait for one of the channels."""
        self._calls = CallChannels(open_channel, timeout_s)
        self._known: set[Exchange] = set()

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
        for binding in (*queue.bindings, *([queue.dead_letter] if queue.dead_letter else [])):
            await self.declare_exchange(binding.exchange)
        async with self._calls.lend() as channel:
            with translated(f"declare {queue.name}", channel):
                try:
                    await self._send_declaration(channel, queue)
                except ChannelInvalidStateError:
                    await self._raise_reason(channel)
                    raise

    async def delete_queue(self, name: str) -> None:
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
        """Declare and bind in one round trip.

        The broker processes a channel in order. The last call, which has no effect of its own, is
        answered once all are done, or fails with the error of the one that failed.
        """
        await channel.queue_declare(
            queue.name,
            durable=not queue.is_exclusive,
            exclusive=queue.is_exclusive,
            arguments=dict(queue_arguments(queue)),
            nowait=True,
        )
        for binding in queue.bindings:
            await channel.queue_bind(
                queue.name, binding.exchange.name, binding.routing_key, nowait=True
            )
        await channel.basic_qos()

    async def _raise_reason(self, channel: Channel) -> None:
        """Raise the error with which the broker closed the channel before the last call was
        sent."""
        await channel.closing
