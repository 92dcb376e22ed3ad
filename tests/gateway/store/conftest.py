"""Each test of this folder runs on SQLite and on PostgreSQL."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.store.batches import Batches
from gateway.store.database import Database
from gateway.store.files.blobs import Blobs
from gateway.store.files.records import Files
from gateway.store.files.uploads import Uploads
from gateway.store.seen_models import SeenModels
from gateway.store.usage import UsageRecords


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest) -> str | None:
    """The URL of an empty database; None for SQLite."""
    if request.param == "sqlite":
        return None
    url: str = request.getfixturevalue("postgres").create_database()
    return url


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
