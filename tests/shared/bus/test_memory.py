"""Lost nodes of the in-memory broker."""

import asyncio
from typing import Any

from shared.bus.base import Queue
from shared.bus.memory import MemoryBroker, MemoryBus

QUEUE = Queue("log", (), expires_s=0.1)


async def test_a_queue_whose_node_is_lost_expires_only_after_its_return() -> None:
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    broker = MemoryBroker()
    async with MemoryBus(broker) as bus:
        await bus.declare(QUEUE)
        broker.take_down(QUEUE.name)
        await asyncio.sleep(0.2)
        broker.bring_back(QUEUE.name)
        returned = await bus.inspect(QUEUE.name)

        await asyncio.sleep(0.3)
        expired = await bus.inspect(QUEUE.name)

    assert (returned is not None, expired, errors) == (True, None, [])
