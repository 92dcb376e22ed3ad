"""Both buses behind a common interface, so that a common suite specifies them."""

import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, Protocol

import aiormq
from aiormq.abc import AbstractChannel

from shared.bus.base import Binding, Bus, Exchange, Queue
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.bus.rabbit import RabbitBus
from shared.errors import BusUnavailable, QueueBusy
from tests.support.network.tcp_proxy import TcpProxy

DIRECT = Exchange("warren.test", "direct")
MAX_BYTES = 1 << 20
PATIENT_S = 120.0
"""How long a bus waits for a busy broker."""

QueueMaker = Callable[..., Queue]


class Wires(Protocol):
    """Connections to a broker."""

    async def connect(self) -> Bus:
        """A connected bus, closed when the test ends."""
        ...

    def sever(self, bus: Bus) -> None:
        """Break the connection of a bus as a broker or a network does."""
        ...

    async def unbind(self, queue: Queue) -> None:
        """Remove a queue's bindings, as an operator can."""
        ...

    async def delete_exchange(self, exchange: Exchange) -> None:
        """Delete an exchange with its bindings, as an operator can."""
        ...


class MemoryWires:
    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._broker = MemoryBroker()

    async def connect(self) -> Bus:
        bus = MemoryBus(self._broker, max_message_bytes=MAX_BYTES)
        return await self._stack.enter_async_context(bus)

    def sever(self, bus: Bus) -> None:
        assert isinstance(bus, MemoryBus)
        bus.sever()

    async def unbind(self, queue: Queue) -> None:
        self._broker.unbind(queue.name)

    async def delete_exchange(self, exchange: Exchange) -> None:
        self._broker.delete_exchange(exchange.name)


class RabbitWires:
    def __init__(self, stack: AsyncExitStack, url: str) -> None:
        self._stack = stack
        self._url = url
        self._proxies: dict[Bus, TcpProxy] = {}

    async def connect(self) -> Bus:
        proxy = await self._stack.enter_async_context(TcpProxy(self._url))
        connecting = connected_to(proxy.url, max_message_bytes=MAX_BYTES)
        bus = await self._stack.enter_async_context(connecting)
        self._proxies[bus] = proxy
        return bus

    def sever(self, bus: Bus) -> None:
        self._proxies[bus].sever()

    async def unbind(self, queue: Queue) -> None:
        async with operating(self._url) as channel:
            for binding in queue.bindings:
                key = binding.routing_key
                await channel.queue_unbind(queue.name, binding.exchange.name, key)

    async def delete_exchange(self, exchange: Exchange) -> None:
        async with operating(self._url) as channel:
            await channel.exchange_delete(exchange.name)


@asynccontextmanager
async def connected_to(
    url: str, *, timeout_s: float = PATIENT_S, **options: Any
) -> AsyncIterator[RabbitBus]:
    """A bus that is connected, even if the broker was too busy to answer its first attempt."""
    async with RabbitBus(url, timeout_s=timeout_s, **options) as bus:
        await bus.wait_connected()
        yield bus


@asynccontextmanager
async def operating(url: str) -> AsyncIterator[AbstractChannel]:
    """A channel of an operator."""
    connection = await aiormq.connect(url)
    try:
        yield await connection.channel()
    finally:
        await connection.close()


def queue_maker(bus: Bus, stack: AsyncExitStack) -> QueueMaker:
    async def remove(name: str) -> None:
        is_removed = False
        while not is_removed:
            await bus.wait_connected()
            with suppress(BusUnavailable):  # a test may have lost the connection just now
                with suppress(QueueBusy):  # it belongs to another connection, and is gone with it
                    await bus.delete_queue(name)
                is_removed = True

    def make(exchange: Exchange = DIRECT, routing_key: str | None = None, **promises: Any) -> Queue:
        name = f"test.{uuid.uuid4().hex}"
        stack.push_async_callback(remove, name)
        key = name if routing_key is None else routing_key
        return Queue(name, (Binding(exchange, key),), **promises)

    return make
