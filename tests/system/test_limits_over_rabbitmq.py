"""Gateways that share the limits of a key over a real broker, with the shipped permissions."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway.intake.key_file import ApiKey
from gateway.intake.limits import Limits
from shared import topology
from shared.bus.base import Message
from shared.bus.rabbit import RabbitBus
from shared.bus.subscribe import receive
from shared.errors import RateLimited
from shared.messages import decode_usage
from tests.support.broker import Broker

pytestmark = pytest.mark.rabbit

KEY = ApiKey("00aa", "alice", "", "", requests_per_minute=5)


@asynccontextmanager
async def gateway(broker: Broker) -> AsyncIterator[Limits]:
    """The limits of one gateway, at a moment that does not pass."""
    async with RabbitBus(broker.url_of("gateway")) as bus:
        limits = Limits(bus, max_detached=3, clock=lambda: 1_800_000_000.0)

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
            await asyncio.wait(tasks)


async def is_admitted(limits: Limits) -> bool:
    try:
        async with limits.admit(KEY) as grant:
            grant.is_published = True
    except RateLimited:
        return False
    return True


async def test_two_gateways_admit_together_what_a_key_may_have(broker: Broker) -> None:
    async with gateway(broker) as first, gateway(broker) as other:
        admitted = [await is_admitted(limits) for limits in (first, other) * 4]

    assert admitted == [True] * 5 + [False] * 3
