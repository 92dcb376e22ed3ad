from collections.abc import AsyncIterator

import pytest

from shared import topology
from shared.bus.memory import MemoryBroker, MemoryBus
from tests.support.workers.batch_worker import MODEL, BatchWorker, working


@pytest.fixture
async def memory_broker() -> MemoryBroker:
    """A broker on which a worker of `MODEL` has declared its queues."""
    broker = MemoryBroker()
    async with MemoryBus(broker) as bus:
        await topology.declare_worker(bus, MODEL, "w")
    return broker


@pytest.fixture
async def bus(memory_broker: MemoryBroker) -> AsyncIterator[MemoryBus]:
    """The connection of the batch run."""
    async with MemoryBus(memory_broker, user="publisher") as bus:
        yield bus


@pytest.fixture
async def theirs(memory_broker: MemoryBroker) -> AsyncIterator[MemoryBus]:
    """The connection of the worker."""
    async with MemoryBus(memory_broker) as bus:
        yield bus


@pytest.fixture
async def worker(theirs: MemoryBus) -> AsyncIterator[BatchWorker]:
    """A worker that runs during the test."""
    worker = BatchWorker(theirs)
    async with working(worker):
        yield worker
