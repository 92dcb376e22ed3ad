"""Gateways that share the limits of API keys."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.intake.limits import Limits
from shared import topology
from shared.bus.base import Bus, Message
from shared.bus.subscribe import receive
from shared.messages import decode_usage


@asynccontextmanager
async def running(limits: Limits, bus: Bus) -> AsyncIterator[Limits]:
    """One gateway's limits, until the context ends."""

    def hear(message: Message) -> None:
        limits.hear(decode_usage(message.body))

    queue = topology.usage_queue(limits.name)
    tasks = [
        asyncio.create_task(receive(bus, queue, hear, limits.listen)),
        asyncio.create_task(limits.announce()),
    ]
    try:
        yield limits
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
