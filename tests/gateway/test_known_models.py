"""The models whose queues a gateway watches after a restart, although no worker is left."""

import time
from functools import partial
from pathlib import Path
from typing import Any

from gateway.intake.keys.key_file import KeyFile
from gateway.store.state import Store, StoredState
from shared import settings, topology
from shared.bus.base import Message
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.messages import UsageRecord, encode
from shared.settings import GatewaySettings
from tests.support.gateway.http import LiveGateway, eventually, hears_a_worker, live_gateway
from tests.support.workers.jobs import new_job, publish
from tests.support.workers.synthetic import echo_worker

DAY_S = 24 * 3600.0


async def is_watched(gateway: LiveGateway, model: str) -> bool:
    """Whether a gateway shows that a job waits for a model."""
    waiting = f'warren_queue_jobs_waiting{{class="interactive",model="{model}"}} 1.0'
    return waiting in (await gateway.http.get("/metrics")).text


async def stored(data_dir: Path) -> tuple[Store, StoredState]:
    """The state of the gateways with this directory."""
    store = Store(settings.load(GatewaySettings, data_dir=data_dir))
    return store, await store.wait_open()


async def wait_until_recorded(data_dir: Path, model: str) -> None:
    store, state = await stored(data_dir)

    async def is_recorded() -> bool:
        return model in await state.models.all()

    await eventually(is_recorded)
    await store.close()


async def test_of_a_worker_that_was_heard(
    broker: MemoryBroker, bus: MemoryBus, tmp_path: Path
) -> None:
    async with live_gateway(broker, data_dir=tmp_path) as gateway:
        async with echo_worker(broker):
            await hears_a_worker(gateway)
        await wait_until_recorded(tmp_path, "echo")
    await publish(bus, new_job("echo"))

    async with live_gateway(broker, data_dir=tmp_path) as gateway:
        await eventually(partial(is_watched, gateway, "echo"))


async def test_of_a_request_that_waited_for_a_worker(
    broker: MemoryBroker, bus: MemoryBus, tmp_path: Path
) -> None:
    await topology.declare_worker(bus, "echo", "gone")
    async with live_gateway(broker, data_dir=tmp_path, request_timeout_s=1) as gateway:
        assert (await gateway.chat(model="echo")).status_code == 504
        await wait_until_recorded(tmp_path, "echo")

    async with live_gateway(broker, data_dir=tmp_path) as gateway:
        await eventually(partial(is_watched, gateway, "echo"))


async def test_of_usage_that_was_recorded_while_no_gateway_ran(
    bus: MemoryBus, tmp_path: Path
) -> None:
    await topology.declare_worker(bus, "echo", "gone")
    await publish(bus, new_job("echo"))
    record = UsageRecord(
        request_id="r", model="echo", job_class="interactive", outcome="completed", ended_at=1.0
    )
    await bus.publish(topology.LEDGER_RECORDS.bindings[0], Message(encode(record)))

    async with live_gateway(bus, data_dir=tmp_path) as gateway:
        await eventually(partial(is_watched, gateway, "echo"))
    await wait_until_recorded(tmp_path, "echo")


async def test_that_api_keys_name(bus: MemoryBus, tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys")
    file.add("alice", models=("echo", "unknown", "other-*"))
    await topology.declare_worker(bus, "echo", "gone")
    await publish(bus, new_job("echo"))

    async with live_gateway(bus, keys_file=file.path) as gateway:
        await eventually(partial(is_watched, gateway, "echo"))


async def test_models_that_are_gone_or_were_not_seen_for_a_month_are_not_watched(
    bus: MemoryBus, tmp_path: Path
) -> None:
    for model in ("echo", "forgotten"):
        await topology.declare_worker(bus, model, "gone")
        await publish(bus, new_job(model))
    store = Store(settings.load(GatewaySettings, data_dir=tmp_path))
    state = await store.open()
    now = time.time()
    await state.models.write({"echo": now - 29 * DAY_S, "forgotten": now - 31 * DAY_S, "gone": now})

    async with live_gateway(bus, data_dir=tmp_path) as gateway:
        await eventually(partial(is_watched, gateway, "echo"))
        metrics = (await gateway.http.get("/metrics")).text

    assert 'model="gone"' not in metrics
    assert 'model="forgotten"' not in metrics
    assert await bus.inspect(topology.jobs_queue("gone", "interactive").name) is None
    assert (await state.models.all()).keys() == {"echo", "gone"}
    await store.close()


async def test_a_model_is_written_once(broker: MemoryBroker, tmp_path: Path) -> None:
    options: dict[str, Any] = {"data_dir": tmp_path, "record_models_s": 0.01}
    async with live_gateway(broker, **options) as gateway, echo_worker(broker):
        await hears_a_worker(gateway)
        await wait_until_recorded(tmp_path, "echo")
        store, state = await stored(tmp_path)
        first = await state.models.all()
        for _ in range(5):
            await gateway.chat(model="echo", max_tokens=1)

        assert await state.models.all() == first
        await store.close()


async def test_a_model_is_written_again_after_a_while(broker: MemoryBroker, tmp_path: Path) -> None:
    options: dict[str, Any] = {"data_dir": tmp_path, "record_models_s": 0.01, "renew_models_s": 0.0}
    async with live_gateway(broker, **options) as gateway, echo_worker(broker):
        await hears_a_worker(gateway)
        await wait_until_recorded(tmp_path, "echo")
        store, state = await stored(tmp_path)
        first = await state.models.all()

        async def is_written_again() -> bool:
            return await state.models.all() != first

        await eventually(is_written_again)
        await store.close()
