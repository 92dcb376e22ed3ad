"""Databases of gateways in tests: their migrations would take longer than most tests."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from gateway.store import database
from gateway.store.database import SQLITE_FILE, Database

_own: set[Path] = set()
"""The directories of `data_dir`."""


@cache
def migrated() -> bytes:
    """The SQLite file of an empty database. It is migrated once in a process, by a thread without
    an event loop."""

    async def migrate(directory: Path) -> None:
        await (await Database.open(None, directory)).close()

    with TemporaryDirectory(prefix="warren-") as name:
        asyncio.run(migrate(Path(name)))
        return (Path(name) / SQLITE_FILE).read_bytes()


@contextmanager
def data_dir() -> Iterator[Path]:
    """A directory for the state of gateways of this process. It contains nothing: a gateway that
    stores nothing opens no database. The database that a gateway creates is `migrated`, which must
    have been called before."""
    _create_migrated()
    with TemporaryDirectory(prefix="warren-") as name:
        _own.add(Path(name))
        yield Path(name)
        _own.remove(Path(name))


@cache
def _create_migrated() -> None:
    """Let the databases in the directories of `data_dir` begin with the content of `migrated`."""
    url_of = database._file_in

    def filled(directory: Path) -> str:
        url = url_of(directory)
        file = directory / SQLITE_FILE
        if directory in _own and not file.stat().st_size:
            file.write_bytes(migrated())
        return url

    pytest.MonkeyPatch().setattr(database, "_file_in", filled)
