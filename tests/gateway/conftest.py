"""A live gateway, a scripted worker, and the broker in memory between them."""

from collections.abc import AsyncIterator

import pytest

from shared.bus.memory import MemoryBroker, MemoryBus
from tests.support.gateway.http import LiveGateway, live_gateway
from tests.support.workers.scripted_worker import ScriptedWorker


@pytest.fixture
async def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
async def bus(broker: MemoryBroker) -> AsyncIterator[MemoryBus]:
    """The gateway's connection."""
    async with MemoryBus(broker) as bus:
        yield bus


@pytest.fixture
async def worker_bus(broker: MemoryBroker) -> AsyncIterator[MemoryBus]:
    """The worker's connection."""
    async with MemoryBus(broker) as bus:
        yield bus


@pytest.fixture
async def worker(worker_bus: MemoryBus) -> AsyncIterator[ScriptedWorker]:
    """Repeats the prompt, until a test gives it another script."""
    async with ScriptedWorker(worker_bus) as worker:
        yield worker


@pytest.fixture
async def gateway(bus: MemoryBus, worker: ScriptedWorker) -> AsyncIterator[LiveGateway]:
    async with live_gateway(bus) as gateway:
        yield gateway
