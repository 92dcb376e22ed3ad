"""What a gateway does beside the lines of batches: which batches it runs, and what it deletes."""

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.batches.batch_runner import _next_look
from gateway.intake.keys.key_file import KeyFile
from gateway.store.batches import Batches, Order
from gateway.store.database import SQLITE_FILE
from gateway.store.state import Store, StoredState
from shared import settings
from shared.bus.memory import MemoryBus
from shared.settings import DAY_S, GatewaySettings
from tests.support.gateway.batches import CHATS, chat, ended, order, until
from tests.support.gateway.http import LiveGateway, eventually, live_gateway
from tests.support.workers.scripted_worker import ScriptedWorker, start_only

_KEPT_S = 1000


async def test_the_batches_of_one_tenant_do_not_hold_up_another(
    bus: MemoryBus, worker: ScriptedWorker, tmp_path: Path
) -> None:
    worker.script = start_only
    keys = KeyFile(tmp_path / "keys")
    secrets = {tenant: keys.add(tenant) for tenant in ("a", "b")}
    few = {"max_batches": 1, "max_first_batches": 1}
    async with live_gateway(bus, data_dir=tmp_path, keys_file=keys.path, **few) as gateway:
        a, b = (of_key(gateway, secret) for secret in secrets.values())
        running = await order(a, [chat("1")])
        running = await until(a, running, lambda now: now.status == "in_progress")
        waiting = await order(a, [chat("2")])

        first = await order(b, [chat("3")])
        first = await until(b, first, lambda now: now.status == "in_progress")

        assert (await a.openai.batches.retrieve(waiting.id)).status == "validating"
        await a.openai.batches.cancel(running.id)
        await until(a, waiting, lambda now: now.status == "in_progress")


def of_key(gateway: LiveGateway, secret: str) -> LiveGateway:
    return replace(gateway, openai=gateway.openai.with_options(api_key=secret))


async def test_leases_are_renewed_while_a_claim_waits_for_the_database(
    bus: MemoryBus, worker: ScriptedWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.script = start_only
    async with live_gateway(bus, data_dir=tmp_path, batch_lease_s=1) as gateway:
        batch = await order(gateway, [chat("1")])
        await worker.wait_until(lambda: worker.num_running == 1)
        is_waiting, may_go_on = asyncio.Event(), asyncio.Event()

        async def claim(*_: object, **__: object) -> None:
            is_waiting.set()
            await may_go_on.wait()

        monkeypatch.setattr(Batches, "claim", claim)
        await is_waiting.wait()
        waiting_since = time.time()

        async def is_renewed() -> bool:
            record = await state.batches.get("", batch.id)
            return record.lease_until > waiting_since + 1.5

        async with stored(tmp_path) as state:
            await eventually(is_renewed)
        may_go_on.set()


async def test_many_changes_do_not_make_many_looks() -> None:
    changed = asyncio.Event()
    began_at = time.monotonic()

    for _ in range(3):
        changed.set()
        await _next_look(changed, look_interval_s=600.0)

    assert not changed.is_set()
    assert time.monotonic() - began_at >= 0.6


async def test_large_lines_run_one_after_another(
    bus: MemoryBus, worker: ScriptedWorker, tmp_path: Path
) -> None:
    async with live_gateway(bus, data_dir=tmp_path, batch_lines_bytes=1) as gateway:
        batch = await ended(gateway, await order(gateway, [chat(str(k)) for k in range(5)]))

    assert batch.status == "completed"
    assert worker.most_running == 1


async def test_no_batch_waits_for_the_memory_of_another(
    bus: MemoryBus, worker: ScriptedWorker, tmp_path: Path
) -> None:
    worker.script = start_only
    async with live_gateway(bus, data_dir=tmp_path, batch_lines_bytes=1) as gateway:
        for k in range(3):
            await order(gateway, [chat(f"{k}-{line}") for line in range(2)])

        await worker.wait_until(lambda: worker.num_running == 3)


async def test_old_batches_and_files_are_deleted_meanwhile(bus: MemoryBus, tmp_path: Path) -> None:
    now = int(time.time())
    async with stored(tmp_path) as state:
        expired, kept = await file_until(state, now - 1), await file_until(state, now + _KEPT_S)
        old, recent = [await failed_batch(state, kept) for _ in range(2)]
    with closing(sqlite3.connect(tmp_path / SQLITE_FILE)) as database, database:
        for batch_id, age_s in ((old, 2 * _KEPT_S), (recent, _KEPT_S / 2)):
            at = (now - age_s, batch_id)
            database.execute("UPDATE batches SET failed_at = ? WHERE id = ?", at)

    async with live_gateway(bus, data_dir=tmp_path, retention_days=_KEPT_S / DAY_S) as gateway:

        async def are_deleted() -> bool:
            listed = {batch.id async for batch in gateway.openai.batches.list()}
            return listed == {recent} and not (tmp_path / "files" / expired).exists()

        await eventually(are_deleted)

    assert (tmp_path / "files" / kept).exists()


@asynccontextmanager
async def stored(data_dir: Path) -> AsyncIterator[StoredState]:
    """The state of a gateway that does not run."""
    store = Store(settings.load(GatewaySettings, data_dir=data_dir))
    try:
        yield await store.open()
    finally:
        await store.close()


async def file_until(state: StoredState, expires_at: int) -> str:
    async with state.files.writing("", "in.jsonl", "batch") as draft:
        draft.expires_at = expires_at
        await draft.write(b"content")
    return draft.id


async def failed_batch(state: StoredState, file_id: str) -> str:
    await state.batches.create("", Order(CHATS, file_id, "24h", 86400))
    batch = await state.batches.claim({}, 60)
    assert batch is not None
    await state.batches.fail(batch.id, batch.fence, [])
    return batch.id
