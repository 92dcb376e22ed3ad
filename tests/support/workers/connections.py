"""Connections to a broker in memory."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shared.bus.base import Bus
from shared.bus.memory import MemoryBroker, MemoryBus


@asynccontextmanager
async def connected(place: Bus | MemoryBroker) -> AsyncIterator[Bus]:
    """A new connection to a broker, until the context ends; a bus is used as it is."""
    if isinstance(place, MemoryBroker):
        async with MemoryBus(place) as bus:
            yield bus
    else:
        yield place
