"""Connections of both buses, and queues that are deleted after their test."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from shared.bus.base import Bus, Queue
from shared.bus.rabbit import RabbitBus, shielded_calls
from tests.shared.bus.wires import (
    PATIENT_S,
    MemoryWires,
    QueueMaker,
    RabbitWires,
    Wires,
    connected_to,
    queue_maker,
)
from tests.support.deployment.broker import Broker


@pytest.fixture
def patient_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that takes long for a call is busy, and has not lost a queue."""
    monkeypatch.setattr(shielded_calls, "_QUIET_S", PATIENT_S)


@pytest.fixture(params=["memory", pytest.param("rabbit", marks=pytest.mark.rabbit)])
async def wires(request: pytest.FixtureRequest, patient_calls: None) -> AsyncIterator[Wires]:
    async with AsyncExitStack() as stack:
        if request.param == "memory":
            yield MemoryWires(stack)
        else:
            broker: Broker = request.getfixturevalue("broker")
            yield RabbitWires(stack, broker.url)


@pytest.fixture
async def bus(wires: Wires) -> Bus:
    return await wires.connect()


@pytest.fixture
async def other_bus(wires: Wires) -> Bus:
    return await wires.connect()


@pytest.fixture
async def rabbit_bus(broker: Broker, patient_calls: None) -> AsyncIterator[RabbitBus]:
    async with connected_to(broker.url) as bus:
        yield bus


@pytest.fixture
async def make_queue(bus: Bus) -> AsyncIterator[QueueMaker]:
    """Chooses a new queue name, and removes the queue in the end."""
    async with AsyncExitStack() as stack:
        yield queue_maker(bus, stack)


@pytest.fixture
async def queue(bus: Bus, make_queue: QueueMaker) -> Queue:
    """A queue of the default kind, which exists."""
    queue = make_queue()
    await bus.declare(queue)
    return queue


@pytest.fixture
async def make_rabbit_queue(rabbit_bus: RabbitBus) -> AsyncIterator[QueueMaker]:
    async with AsyncExitStack() as stack:
        yield queue_maker(rabbit_bus, stack)
