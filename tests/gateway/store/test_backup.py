"""A database that is copied while a gateway writes to it, as docs/deployment/backup.md says."""

import asyncio
import shlex
import sqlite3
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import Connection, make_url
from sqlalchemy.ext.asyncio import create_async_engine

from gateway.store import migrations
from gateway.store.database import SQLITE_FILE, Database
from gateway.store.files.blobs import Blobs
from gateway.store.files.records import FileRecord, Files
from gateway.store.schema import METADATA
from tests.support.deployment.postgres import PostgresServer
from tests.support.pages import ROOT, commands

PAGE = ROOT / "docs" / "deployment" / "backup.md"
OLDER = "batch_keys"
"""A revision after which a table was added."""

CopyDatabase = Callable[[Path], str | None]
"""Copies the database into a directory, or another database; returns the URL of the copy."""


@pytest.fixture
def copy_database(
    request: pytest.FixtureRequest, database_url: str | None, tmp_path: Path
) -> CopyDatabase:
    def copy_sqlite(directory: Path) -> None:
        with (
            closing(sqlite3.connect(tmp_path / SQLITE_FILE)) as source,
            closing(sqlite3.connect(directory / SQLITE_FILE)) as copy,
        ):
            source.backup(copy)

    if database_url is None:
        return copy_sqlite
    server = request.getfixturevalue("postgres")

    def copy_postgresql(_: Path) -> str:
        copy: str = server.create_database()
        server.run("pg_dump", "--format=custom", "--file=warren.dump", database_url)
        server.run("pg_restore", f"--dbname={copy}", "warren.dump")
        return copy

    return copy_postgresql


def copy_files(source: Path, target: Path) -> None:
    target.mkdir()
    copy = ["cp", "--preserve", f"--target-directory={target}", "{}", "+"]
    subprocess.run(["find", source, "-type", "f", "!", "-name", "*#*", "-exec", *copy], check=True)


async def write(files: Files, content: bytes) -> str:
    async with files.writing("a", "name.jsonl", "batch") as draft:
        await draft.write(content)
    return draft.record.id


@asynccontextmanager
async def written_meanwhile(files: Files) -> AsyncIterator[None]:
    async def write_on() -> None:
        while True:
            await write(files, b"meanwhile")

    writing = asyncio.create_task(write_on())
    yield
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing


async def content(files: Files, file_id: str) -> bytes:
    return b"".join([part async for part in files.content(file_id)])


async def all_files(files: Files) -> list[FileRecord]:
    return await files.page("a", purpose=None, after=None, limit=10_000, newest_first=False)


async def test_a_copy_has_all_that_was_written_before_it_and_every_file_that_it_lists(
    files: Files, copy_database: CopyDatabase, tmp_path: Path
) -> None:
    before = {await write(files, content): content for content in (b"1", b"2", b"3")}
    directory = tmp_path / "copy"
    directory.mkdir()

    async with written_meanwhile(files):
        url = await asyncio.to_thread(copy_database, directory)
        await asyncio.to_thread(copy_files, tmp_path / "files", directory / "files")

    restored = await Database.open(url, directory)
    copies = Files(restored, Blobs.in_directory(directory / "files"))
    listed = {file.id: await content(copies, file.id) for file in await all_files(copies)}
    await restored.close()
    assert {file_id: listed.pop(file_id) for file_id in before} == before
    assert set(listed.values()) <= {b"meanwhile"}


async def test_a_dump_of_an_older_version_replaces_a_newer_database(
    postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = make_url(postgres.create_database())
    name = str(url.database)
    place = {"HOST": url.host, "PORT": url.port, "USER": url.username, "DATABASE": name}
    for part, value in place.items():
        monkeypatch.setenv(f"PG{part}", str(value))

    async def run_of_the_page(*programs: str) -> None:
        for line in commands(PAGE):
            program, *args = shlex.split(line.replace("$PGDATABASE", name))
            if program in programs:
                await asyncio.to_thread(postgres.run, program, *args)

    engine = create_async_engine(url.set(drivername="postgresql+asyncpg"))
    async with engine.begin() as connection:
        await connection.run_sync(upgrade_to_older)
    await engine.dispose()
    await run_of_the_page("pg_dump")
    newer = await Database.open(url.render_as_string(), tmp_path)
    await write(Files(newer, Blobs.in_directory(tmp_path / "files")), b"after the dump")
    await newer.close()

    await run_of_the_page("dropdb", "createdb", "pg_restore")

    restored = await Database.open(url.render_as_string(), tmp_path)
    async with restored.read() as connection:
        assert await connection.run_sync(difference) == []
    assert await all_files(Files(restored, Blobs.in_directory(tmp_path / "files"))) == []
    await restored.close()


def upgrade_to_older(connection: Connection) -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(str(migrations.__file__)).parent))
    config.attributes["connection"] = connection
    command.upgrade(config, OLDER)


def difference(connection: Connection) -> object:
    """What the tables lack of the schema, and have beside it."""
    return compare_metadata(MigrationContext.configure(connection), METADATA)
