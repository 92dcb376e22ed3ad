import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, text
from sqlalchemy.exc import IntegrityError, OperationalError

from gateway.store.database import Database, reason_of, uncancelled
from gateway.store.schema import METADATA
from shared.errors import StartupError, Unavailable
from tests.support.deployment.postgres import PostgresServer
from tests.support.deployment.processes import free_port


async def test_the_migrations_make_the_tables(database: Database) -> None:
    def difference(connection: Connection) -> Any:
        return compare_metadata(MigrationContext.configure(connection), METADATA)

    async with database.begin() as connection:
        assert await connection.run_sync(difference) == []


async def test_gateways_may_start_at_once(new_url: str | None, tmp_path: Path) -> None:
    opening = [Database.open(new_url, tmp_path) for _ in range(4)]

    for database in await asyncio.gather(*opening):
        await database.close()


async def test_a_database_of_a_newer_version_is_opened_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    newer = await Database.open(None, tmp_path)
    async with newer.begin() as connection:
        await connection.execute(text("UPDATE alembic_version SET version_num = 'future'"))
    await newer.close()

    older = await Database.open(None, tmp_path)

    async with older.read() as connection:
        version = await connection.execute(text("SELECT version_num FROM alembic_version"))
        assert version.scalars().all() == ["future"]
    assert "a newer version has migrated the database" in caplog.text
    await older.close()


def modes_in(directory: Path) -> list[int]:
    return [path.stat().st_mode for path in directory.iterdir()]


def test_other_users_cannot_read_it(tmp_path: Path) -> None:
    async def use() -> list[int]:
        database = await Database.open(None, tmp_path)
        async with database.read() as connection:
            await connection.execute(text("SELECT version_num FROM alembic_version"))
            modes = modes_in(tmp_path)
        await database.close()
        return modes

    tmp_path.chmod(0o755)

    modes = asyncio.run(use())

    assert modes
    assert not any(mode & 0o077 for mode in modes)


async def test_a_database_out_of_reach_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        await Database.open(f"postgresql://nobody@127.0.0.1:{free_port()}/none", tmp_path)


@pytest.mark.parametrize("url", ["mysql://host/name", "no url"])
async def test_other_databases_are_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="database"):
        await Database.open(url, tmp_path)


async def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(StartupError, match="file/data"):
        await Database.open(None, tmp_path / "file" / "data")


async def test_a_transaction_ends_although_its_caller_is_cancelled_again_and_again(
    database: Database,
) -> None:
    ended = []

    @uncancelled
    async def read() -> None:
        async with database.begin() as connection:
            ended.append((await connection.execute(text("SELECT 7"))).scalar_one())

    reading = asyncio.create_task(read())
    while not reading.done():
        await asyncio.sleep(0)
        reading.cancel()

    await asyncio.wait([reading])
    assert (reading.cancelled(), ended) == (True, [7])


async def test_a_closed_database_stays_closed(database: Database) -> None:
    await database.close()

    with pytest.raises(Unavailable, match="closed"):
        async with database.begin():
            pass


async def test_a_database_that_cannot_write_now_is_unavailable(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    database = await Database.open(postgres.create_database(), tmp_path)

    async def write_as_on_a_standby() -> None:
        async with database.begin() as connection:
            await connection.execute(text("SET TRANSACTION READ ONLY"))
            await connection.execute(text("DELETE FROM usage"))

    with pytest.raises(Unavailable):
        await write_as_on_a_standby()

    await database.close()


async def test_an_unexpected_error_has_none_of_the_values(database: Database) -> None:
    async def insert() -> None:
        async with database.begin() as connection:
            await connection.execute(
                text("INSERT INTO usage (request_id) VALUES (:id)"), {"id": "a prompt"}
            )

    with pytest.raises(IntegrityError) as raised:
        await insert()

    assert "INSERT INTO usage" in str(raised.value)
    assert "a prompt" not in str(raised.value)


async def test_a_statement_without_an_answer_ends(
    postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.store.database._STATEMENT_TIMEOUT_S", 0.5)
    database = await Database.open(postgres.create_database(), tmp_path)

    async def wait_for_an_hour() -> None:
        async with database.begin() as connection:
            await connection.execute(text("SELECT pg_sleep(3600)"))

    with pytest.raises(Unavailable):
        await wait_for_an_hour()

    await database.close()


async def test_a_transaction_waits_for_a_connection_but_not_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.store.database._POOL_TIMEOUT_S", 0.1)
    database = await Database.open(None, tmp_path)

    async with AsyncExitStack() as stack:
        for _ in range(15):
            await stack.enter_async_context(database.read())
        with pytest.raises(Unavailable):
            await stack.enter_async_context(database.read())

    await database.close()


async def test_sqlite_is_read_while_another_transaction_writes(tmp_path: Path) -> None:
    database = await Database.open(None, tmp_path)
    count = text("SELECT count(*) FROM usage")

    async with database.begin(), database.read() as first, database.read() as second:
        found = [(await reader.execute(count)).scalar_one() for reader in (first, second)]

    assert found == [0, 0]
    await database.close()


async def test_writers_that_wait_leave_connections_to_readers(database: Database) -> None:
    num_begun, have_begun, may_end = 0, asyncio.Event(), asyncio.Event()

    async def write() -> None:
        nonlocal num_begun
        async with database.begin():
            num_begun += 1
            if num_begun == (1 if database.is_sqlite else 12):
                have_begun.set()
            await may_end.wait()

    writing = [asyncio.create_task(write()) for _ in range(12)]
    await have_begun.wait()

    async with database.read() as connection:
        assert (await connection.execute(text("SELECT 7"))).scalar_one() == 7
    may_end.set()
    await asyncio.gather(*writing)


def test_a_reason_has_no_statement() -> None:
    error = OperationalError("SELECT secret", {"a": "secret"}, OSError(28, "No space left"))

    assert reason_of(error) == "OSError: [Errno 28] No space left"
