"""Calls are repeated while the broker is away, and waiting for it has a limit."""

import asyncio
import math

import pytest

from shared.bus.base import Queue, QueueState
from shared.bus.memory import MemoryBus
from shared.bus.retry import connected_within, until_available
from shared.errors import AccessRefused, BusUnavailable

QUEUE = Queue("kept")


async def test_a_call_is_repeated_once_the_broker_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    connections: list[bool] = []

    async with MemoryBus() as bus:
        await bus.declare(QUEUE)

        async def inspect() -> QueueState | None:
            connections.append(bus.is_connected)
            if len(connections) == 1:
                bus.sever(for_s=0.02)
            return await bus.inspect(QUEUE.name)

        state = await until_available(bus, inspect, "queue not found", pause_s=0.0)

    assert state is not None
    assert connections == [True, True]
    assert [record.getMessage() for record in caplog.records] == ["queue not found, retrying"]


async def test_another_error_is_the_callers() -> None:
    async def refused() -> None:
        raise AccessRefused("not this queue")

    async with MemoryBus() as bus:
        with pytest.raises(AccessRefused):
            await until_available(bus, refused, "queue not found")


async def test_the_wait_for_a_broker_has_a_limit_and_a_message() -> None:
    async with MemoryBus() as bus:
        await connected_within(bus, otherwise="unreachable")
        bus.sever(for_s=math.inf)
        async with asyncio.timeout(5):
            with pytest.raises(BusUnavailable, match="unreachable"):
                await connected_within(bus, 0.01, otherwise="unreachable")
