import asyncio
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection

from gateway.store.database import Database
from gateway.store.tables import METADATA
from shared.errors import StartupError, Unavailable
from tests.support.processes import free_port


async def test_the_migrations_make_the_tables(database: Database) -> None:
    def difference(connection: Connection) -> Any:
        return compare_metadata(MigrationContext.configure(connection), METADATA)

    async with database.begin() as connection:
        assert await connection.run_sync(difference) == []


async def test_gateways_may_start_at_once(database_url: str | None, tmp_path: Path) -> None:
    opening = [Database.open(database_url, tmp_path) for _ in range(4)]

    for database in await asyncio.gather(*opening):
        await database.close()


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
