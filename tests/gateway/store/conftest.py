"""Each test of this folder runs on SQLite and on PostgreSQL."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.store.batches import Batches
from gateway.store.database import Database
from gateway.store.files.blobs import Blobs
from gateway.store.files.records import Files
from gateway.store.files.uploads import Uploads
from gateway.store.seen_models import SeenModels
from gateway.store.tenants.keys import StoredKeys
from gateway.store.tenants.limits import StoredLimits
from gateway.store.usage import UsageRecords
from tests.support.deployment.postgres import PostgresServer


@pytest.fixture(params=["sqlite", "postgresql"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def new_url(kind: str, request: pytest.FixtureRequest) -> str | None:
    """The URL of a database that is yet to be migrated; None for SQLite."""
    if kind == "sqlite":
        return None
    url: str = request.getfixturevalue("postgres").create_database()
    return url


@pytest.fixture(scope="session")
def migrated_template(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of an empty database of PostgreSQL, as `migrated_file` is an empty database of
    SQLite."""
    url = postgres.create_database()

    async def migrate() -> None:
        await (await Database.open(url, tmp_path_factory.mktemp("unused"))).close()

    asyncio.run(migrate())
    return url


@pytest.fixture
def database_url(
    kind: str, request: pytest.FixtureRequest, migrated_file: Path, tmp_path: Path
) -> str | None:
    """The URL of a database without records; None for SQLite."""
    if kind == "sqlite":
        shutil.copy(migrated_file, tmp_path)
        return None
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.create_database(request.getfixturevalue("migrated_template"))


@pytest.fixture
async def database(database_url: str | None, tmp_path: Path) -> AsyncIterator[Database]:
    database = await Database.open(database_url, tmp_path)
    yield database
    await database.close()


@pytest.fixture
def files(database: Database, tmp_path: Path) -> Files:
    return Files(database, Blobs.in_directory(tmp_path / "files"))


@pytest.fixture
def uploads(database: Database, files: Files) -> Uploads:
    return Uploads(database, files, max_bytes=1000)


@pytest.fixture
def batches(database: Database) -> Batches:
    return Batches(database)


@pytest.fixture
def usage(database: Database) -> UsageRecords:
    return UsageRecords(database)


@pytest.fixture
def seen_models(database: Database) -> SeenModels:
    return SeenModels(database)


@pytest.fixture
def stored_limits(database: Database) -> StoredLimits:
    return StoredLimits(database)


@pytest.fixture
def stored_keys(database: Database) -> StoredKeys:
    return StoredKeys(database)
