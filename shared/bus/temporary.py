"""Queues that exist for the duration of a block."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shared.bus.base import Bus, Queue


@asynccontextmanager
async def temporary(bus: Bus, queue: Queue) -> AsyncIterator[None]:
    """Declare the exclusive ``queue`` and delete it at the end, which a cancelled declaration does
    itself. Raises what `Bus.declare` and `Bus.delete_queue` raise."""
    await bus.declare(queue)
    try:
        yield
    finally:
        await bus.delete_queue(queue.name)
