"""A disk that is nearly full takes nothing new, and all that has begun."""

import logging
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest

from gateway.store.files.free_space import FreeSpace
from shared.bus.memory import MemoryBus
from shared.errors import Unavailable
from tests.support.gateway.batches import chat, ended, order, output
from tests.support.gateway.http import LiveGateway, live_gateway
from tests.support.workers.scripted_worker import MODEL, ScriptedWorker

MIB = 1 << 20


class Disk:
    """The disk of all directories, with 100 GiB."""

    class Usage(NamedTuple):
        total: int
        used: int
        free: int

    def __init__(self) -> None:
        self.total, self.free = 100 << 30, 100 << 30

    def usage(self, _: Path) -> Usage:
        return self.Usage(self.total, self.total - self.free, self.free)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(shutil, "disk_usage", disk.usage)
    monkeypatch.setattr("gateway.store.files.free_space._LOOK_INTERVAL_S", 0.0)
    return disk


@pytest.fixture
async def storing(
    bus: MemoryBus, worker: ScriptedWorker, disk: Disk, tmp_path: Path
) -> AsyncIterator[LiveGateway]:
    async with live_gateway(bus, data_dir=tmp_path) as gateway:
        yield gateway


@pytest.mark.parametrize(
    ("total", "kept"),
    [(100 << 30, 2048 * MIB), (20 << 30, 1024 * MIB), (2 << 30, 256 * MIB), (200 * MIB, 50 * MIB)],
)
async def test_a_part_of_each_disk_is_kept(
    disk: Disk, tmp_path: Path, total: int, kept: int
) -> None:
    disk.total, disk.free = total, kept
    space = FreeSpace(tmp_path)
    await space.require()

    disk.free -= 1

    with pytest.raises(Unavailable, match="nearly full"):
        await space.require()
    await FreeSpace().require()  # of a database or a store elsewhere


async def status(gateway: LiveGateway, path: str, body: dict[str, object]) -> int:
    return (await gateway.http.post(path, json=body)).status_code


async def test_nothing_new_is_stored_on_a_disk_that_is_nearly_full(
    storing: LiveGateway, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    file = await storing.openai.files.create(file=("in.jsonl", b"{}\n"), purpose="batch")
    conversation = await storing.openai.conversations.create()
    item = {"type": "message", "role": "user", "content": "more"}
    question = {"model": MODEL, "input": "one"}
    upload = {"bytes": 5, "filename": "f", "mime_type": "text/plain", "purpose": "batch"}
    pending = (await storing.http.post("/v1/uploads", json=upload)).json()["id"]
    disk.free = MIB

    with caplog.at_level(logging.ERROR):
        refused = await storing.http.post(
            "/v1/files", data={"purpose": "batch"}, files={"file": ("f", b"some")}
        )
    part = await storing.http.post(f"/v1/uploads/{pending}/parts", files={"data": b"bytes"})
    statuses = [
        part.status_code,
        await status(storing, "/v1/conversations", {}),
        await status(storing, f"/v1/conversations/{conversation.id}/items", {"items": [item]}),
        await status(storing, "/v1/responses", {**question, "store": True}),
        await status(
            storing,
            "/v1/batches",
            {
                "input_file_id": file.id,
                "endpoint": "/v1/chat/completions",
                "completion_window": "24h",
            },
        ),
    ]
    answered = await storing.http.post("/v1/responses", json=question)
    metrics = (await storing.http.get("/metrics")).text

    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "service_unavailable"
    assert "nearly full" in refused.json()["error"]["message"]
    assert statuses == [503] * 5
    assert answered.status_code == 200  # its client does not rely on what is stored
    assert 'warren_gateway_store_up{store="files_disk"} 0.0' in metrics
    assert "disk of files unavailable" in caplog.text
    assert await storing.openai.files.content(file.id)
    disk.free = disk.total
    assert await status(storing, "/v1/conversations", {}) == 200


async def test_a_batch_in_progress_ends_on_a_disk_that_is_nearly_full(
    bus: MemoryBus, worker_bus: MemoryBus, disk: Disk, tmp_path: Path
) -> None:
    async with live_gateway(bus, data_dir=tmp_path) as gateway:
        batch = await order(gateway, [chat("a")])
        disk.free = MIB

        async with ScriptedWorker(worker_bus):
            batch = await ended(gateway, batch)
        (answer,) = await output(gateway, batch.output_file_id)

    assert batch.status == "completed"
    assert answer["response"]["status_code"] == 200
