"""Helpers for what bus tests do all the time."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from shared.bus.base import Bus, Consumer, Delivery, Message, Queue

QUIET_S = 0.1
"""How long a test waits to see that nothing happens."""


async def publish(bus: Bus, queue: Queue, bodies: Iterable[bytes]) -> None:
    for body in bodies:
        await bus.publish(queue.bindings[0], Message(body))


async def take(consumer: Consumer, count: int = 1) -> list[Delivery]:
    return [await anext(consumer) for _ in range(count)]


async def take_bodies(consumer: Consumer, count: int) -> list[bytes]:
    return [delivery.message.body for delivery in await take(consumer, count)]


async def take_to_the_end(consumer: Consumer) -> None:
    while True:
        await take(consumer)


async def is_quiet(consumer: Consumer) -> bool:
    """Whether no further delivery arrives."""
    try:
        await asyncio.wait_for(anext(consumer), QUIET_S)
    except TimeoutError:
        return True
    return False


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait until the condition holds; if it never does, the test's time limit ends the wait."""
    while not await condition():  # noqa: ASYNC110 (a broker's state tells nobody of changes)
        await asyncio.sleep(0.02)


def numbered(count: int) -> list[bytes]:
    return [b"%d" % k for k in range(count)]
