"""The way of usage records from the broker to the database."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from gateway.ledger.recorder import UsageRecorder
from gateway.store.database import Database
from gateway.store.state import Store
from shared import settings, topology
from shared.bus.base import Message
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.messages import UsageRecord, encode
from shared.settings import DAY_S, GatewaySettings
from shared.telemetry.metrics import Catalog
from shared.topology import Publishers
from tests.support.deployment.postgres import PostgresServer
from tests.support.gateway.http import eventually, live_gateway

NAME = "warren_gateway_usage_records_total"
NUM_RECORDS = 1200


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
async def bus(broker: MemoryBroker) -> AsyncIterator[MemoryBus]:
    async with MemoryBus(broker) as bus:
        await bus.declare(topology.LEDGER_RECORDS)
        yield bus


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = Store(settings.load(GatewaySettings, data_dir=tmp_path / "data"))
    yield store
    await store.close()


@pytest.fixture
def catalog() -> Catalog:
    return Catalog()


def new_recorder(
    bus: MemoryBus,
    store: Store,
    catalog: Catalog,
    on_record: Callable[[UsageRecord], None] = lambda _: None,
) -> UsageRecorder:
    return UsageRecorder(bus, store, Publishers([bus.user]), catalog, 60, on_record)


@pytest.fixture
async def recorder(bus: MemoryBus, store: Store, catalog: Catalog) -> AsyncIterator[UsageRecorder]:
    recorder = new_recorder(bus, store, catalog)
    async with running(recorder):
        yield recorder


@asynccontextmanager
async def running(recorder: UsageRecorder) -> AsyncIterator[None]:
    task = asyncio.create_task(recorder.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def execute(database: Database, statement: str) -> None:
    async with database.begin() as connection:
        await connection.execute(text(statement))


async def publish(bus: MemoryBus, request_id: str, **fields: Any) -> None:
    record = UsageRecord(
        request_id=request_id,
        job_class="batch",
        outcome="completed",
        num_output_tokens=2,
        **{"model": "m", "attempt": 1, "ended_at": 1.0, **fields},
    )
    await bus.publish(topology.LEDGER_RECORDS.bindings[0], Message(encode(record)))


async def wait_until_counted(catalog: Catalog, result: str, number: int) -> None:
    async def are_counted() -> bool:
        return catalog.registry.get_sample_value(NAME, {"result": result}) == number

    await eventually(are_counted)


async def num_tokens(store: Store) -> int:
    sums = await (await store.open()).usage.sums((), start=0, end=2)
    return sum(one.used.num_output_tokens for one in sums)


async def test_records_are_written_in_batches_and_acknowledged(
    bus: MemoryBus, store: Store, catalog: Catalog, recorder: UsageRecorder
) -> None:
    for number in range(NUM_RECORDS):
        await publish(bus, f"r{number}")

    await wait_until_counted(catalog, "written", NUM_RECORDS)

    state = await bus.inspect(topology.LEDGER_RECORDS.name)
    assert state is not None
    assert state.num_ready == 0
    assert await num_tokens(store) == 2 * NUM_RECORDS


async def test_a_record_that_comes_again_changes_nothing(
    bus: MemoryBus, store: Store, catalog: Catalog, recorder: UsageRecorder
) -> None:
    await publish(bus, "r")
    await wait_until_counted(catalog, "written", 1)

    await publish(bus, "r")

    await wait_until_counted(catalog, "repeated", 1)
    assert await num_tokens(store) == 2


async def test_what_is_no_record_is_dropped(
    bus: MemoryBus,
    broker: MemoryBroker,
    store: Store,
    catalog: Catalog,
    recorder: UsageRecorder,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with MemoryBus(broker, user="mallory") as stranger:
        await bus.publish(topology.LEDGER_RECORDS.bindings[0], Message(b"?"))
        await publish(stranger, "forged")
        await publish(bus, "r")

    await wait_until_counted(catalog, "written", 1)

    assert catalog.registry.get_sample_value(NAME, {"result": "dropped"}) == 2
    assert caplog.text.count("usage record dropped") == 2


async def test_trusted_records_are_heard(
    bus: MemoryBus, broker: MemoryBroker, store: Store, catalog: Catalog
) -> None:
    records: list[UsageRecord] = []
    async with (
        MemoryBus(broker, user="mallory") as stranger,
        running(new_recorder(bus, store, catalog, records.append)),
    ):
        await publish(stranger, "forged", model="forged")
        await publish(bus, "r", model="n")
        await wait_until_counted(catalog, "written", 1)

    assert [(record.request_id, record.model) for record in records] == [("r", "n")]


async def test_records_wait_for_the_database(
    bus: MemoryBus, store: Store, catalog: Catalog, recorder: UsageRecorder, tmp_path: Path
) -> None:
    (tmp_path / "data").touch()  # no directory can be created
    await publish(bus, "r")
    await asyncio.sleep(0.5)

    (tmp_path / "data").unlink()

    await wait_until_counted(catalog, "written", 1)


async def test_records_outlast_a_database_that_refuses_them_all(
    bus: MemoryBus,
    catalog: Catalog,
    postgres: PostgresServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    url = postgres.create_database()
    store = Store(settings.load(GatewaySettings, data_dir=tmp_path, database_url=url))
    database = await Database.open(url, tmp_path)
    await execute(database, "ALTER TABLE usage RENAME TO elsewhere")

    async def is_retrying() -> bool:
        return "usage records not written, retrying" in caplog.text

    async with running(new_recorder(bus, store, catalog)):
        await publish(bus, "r")
        await publish(bus, "s")
        await eventually(is_retrying)
        await execute(database, "ALTER TABLE elsewhere RENAME TO usage")
        await wait_until_counted(catalog, "written", 2)

    assert catalog.registry.get_sample_value(NAME, {"result": "dropped"}) == 0
    await database.close()
    await store.close()


@pytest.mark.parametrize("fault", [{"ended_at": 1e18}, {"num_cached_tokens": 1 << 63}])
async def test_a_record_with_a_value_that_cannot_be_stored_is_dropped_alone(
    bus: MemoryBus,
    catalog: Catalog,
    postgres: PostgresServer,
    tmp_path: Path,
    fault: dict[str, float],
) -> None:
    url = postgres.create_database()
    store = Store(settings.load(GatewaySettings, data_dir=tmp_path, database_url=url))

    async with running(new_recorder(bus, store, catalog)):
        await publish(bus, "bad", **fault)
        await publish(bus, "good")
        await wait_until_counted(catalog, "written", 1)
        await wait_until_counted(catalog, "dropped", 1)

    await store.close()


async def test_a_gateway_deletes_old_records(
    broker: MemoryBroker, store: Store, tmp_path: Path
) -> None:
    now = time.time()
    usage = (await store.open()).usage
    await usage.write([a_record("old", now - 2000), a_record("recent", now - 500)])

    async def is_one_left() -> bool:
        (found,) = await usage.sums((), start=0, end=now)
        return found.used.num_requests == 1

    options = {"data_dir": tmp_path / "data", "retention_days": f"usage={1000 / DAY_S}"}
    async with live_gateway(broker, **options):
        await eventually(is_one_left)
    (left,) = await usage.sums((), start=now - 1000, end=now)

    assert left.used.num_requests == 1


def a_record(request_id: str, ended_at: float) -> UsageRecord:
    return UsageRecord(
        request_id=request_id,
        job_class="batch",
        outcome="completed",
        model="m",
        attempt=1,
        ended_at=ended_at,
    )


async def test_a_new_recorder_writes_what_the_last_one_left(
    bus: MemoryBus, store: Store, catalog: Catalog
) -> None:
    await publish(bus, "r")
    async with running(new_recorder(bus, store, Catalog())):
        await asyncio.sleep(0.05)  # it holds the record, and has not written it

    async with running(new_recorder(bus, store, catalog)):
        await wait_until_counted(catalog, "written", 1)
