"""A live gateway, a scripted worker, and the broker in memory between them.

A module changes them with fixtures of its own: `worker_script`, `parsers`, `gateway_options`.
"""

from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.store.database import SQLITE_FILE
from shared.bus.memory import MemoryBroker, MemoryBus
from tests.support.gateway.http import LiveGateway, hears_a_worker, live_gateway
from tests.support.gateway.once.databases import migrated
from tests.support.network.attacks import Victim, running_victim
from tests.support.workers.scripted_worker import Script, ScriptedWorker, repeat_the_prompt


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
def worker_script() -> Script:
    """What the worker does with a job, until a test gives it another script."""
    return repeat_the_prompt


@pytest.fixture
def parsers() -> Mapping[str, str]:
    """The parsers that the worker announces. If there are any, the gateway has heard of them."""
    return {}


@pytest.fixture
def gateway_options() -> Mapping[str, Any]:
    """The gateway's settings."""
    return {}


@pytest.fixture
async def worker(
    worker_bus: MemoryBus, worker_script: Script, parsers: Mapping[str, Any]
) -> AsyncIterator[ScriptedWorker]:
    worker = ScriptedWorker(worker_bus, worker_script)
    worker.announcement = msgspec.structs.replace(worker.announcement, **parsers)
    async with worker:
        yield worker


@pytest.fixture
async def gateway(
    bus: MemoryBus,
    worker: ScriptedWorker,
    parsers: Mapping[str, str],
    gateway_options: Mapping[str, Any],
) -> AsyncIterator[LiveGateway]:
    async with live_gateway(bus, **gateway_options) as gateway:
        if parsers:
            await hears_a_worker(gateway)
        yield gateway


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty SQLite database."""
    file = tmp_path_factory.mktemp("migrated") / SQLITE_FILE
    file.write_bytes(migrated())
    return file


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    """The gateway that the attacks of a module share."""
    with running_victim(tmp_path_factory.mktemp("victim") / "log") as victim:
        yield victim
