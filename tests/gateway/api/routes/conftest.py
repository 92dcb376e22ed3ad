"""A gateway that has a directory of its own."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.bus.memory import MemoryBus
from tests.support.http import LiveGateway, live_gateway
from tests.support.scripted_worker import ScriptedWorker


@pytest.fixture
async def storing(
    bus: MemoryBus, worker: ScriptedWorker, tmp_path: Path
) -> AsyncIterator[LiveGateway]:
    async with live_gateway(bus, data_dir=tmp_path) as gateway:
        yield gateway
