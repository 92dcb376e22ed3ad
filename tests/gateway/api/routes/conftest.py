"""Gateways with a directory of their own, and with API keys."""

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.intake.keys.key_file import KeyFile
from shared.bus.memory import MemoryBus
from tests.support.gateway.http import LiveGateway, live_gateway
from tests.support.workers.scripted_worker import ScriptedWorker


@pytest.fixture
async def storing(
    bus: MemoryBus, worker: ScriptedWorker, migrated_file: Path, tmp_path: Path
) -> AsyncIterator[LiveGateway]:
    shutil.copy(migrated_file, tmp_path)
    async with live_gateway(bus, data_dir=tmp_path) as gateway:
        yield gateway


@pytest.fixture
async def closed_gateway(bus: MemoryBus, tmp_path: Path) -> AsyncIterator[LiveGateway]:
    """A gateway that requires an API key, and a client that has none."""
    file = KeyFile(tmp_path / "keys")
    file.add("alice")
    async with live_gateway(bus, keys_file=file.path) as gateway:
        yield gateway
