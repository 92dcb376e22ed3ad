"""Nothing of an erased tenant stays in any table, whatever tables there are."""

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import JSON, Column, String, Table, func, insert, select
from sqlalchemy.types import BigInteger, Boolean, Float, Integer, LargeBinary

from gateway.store.database import Database
from gateway.store.files.blobs import Blobs
from gateway.store.files.exact_answers import ExactAnswers
from gateway.store.files.records import Files
from gateway.store.schema import FILES, METADATA
from gateway.store.tenants.erasure import Erasure
from shared.errors import Unavailable

OF_NOBODY = {"models", "ended_sessions"}
"""The tables that hold nothing of a tenant: the sessions are hashes of names."""
_VALUES = {
    JSON: {},
    BigInteger: 1,
    Integer: 1,
    Boolean: False,
    Float: 1.0,
    LargeBinary: b"text",
}


def refers_to_a_tenant(table: Table) -> bool:
    parents = {key.column.table for key in table.foreign_keys}
    return "tenant" in table.c or any(map(refers_to_a_tenant, parents))


def value_of(column: Column[Any], tenant: str) -> Any:
    """A value that is the same for all rows of the tenant, so that they refer to each other."""
    if column.name == "tenant":
        return tenant
    if column.foreign_keys:
        (key,) = column.foreign_keys
        return value_of(key.column, tenant)
    if isinstance(column.type, String):
        return f"{column.table.name} of {tenant}"[: column.type.length]
    return _VALUES[type(column.type)]


async def fill(database: Database, tenant: str) -> None:
    """Write a row of the tenant to each table that has rows of tenants."""
    async with database.begin() as connection:
        for table in filter(refers_to_a_tenant, METADATA.sorted_tables):
            row = {column.name: value_of(column, tenant) for column in table.c}
            await connection.execute(insert(table).values(row))


async def num_rows(database: Database) -> dict[str, int]:
    async with database.read() as connection:
        return {
            table.name: (
                await connection.execute(select(func.count()).select_from(table))
            ).scalar_one()
            for table in METADATA.sorted_tables
        }


@pytest.fixture
def erasure(database: Database, files: Files, tmp_path: Path) -> Erasure:
    answers = ExactAnswers(database, Blobs.in_directory(tmp_path / "files"))
    return Erasure(database, files, answers)


def test_every_table_says_whose_its_rows_are() -> None:
    of_tenants = {table.name for table in METADATA.sorted_tables if refers_to_a_tenant(table)}

    assert of_tenants == METADATA.tables.keys() - OF_NOBODY
    assert [
        str(column)
        for table in METADATA.sorted_tables
        for column in table.c
        if "tenant" in column.name and column.name != "tenant"
    ] == []


async def test_nothing_of_a_tenant_is_left_in_any_table(
    database: Database, erasure: Erasure
) -> None:
    await fill(database, "alice")
    await fill(database, "bob")

    num_deleted = {**await erasure.erase("alice"), **await erasure.erase_usage("alice")}

    assert num_deleted == dict.fromkeys(METADATA.tables.keys() - OF_NOBODY, 1)
    assert await num_rows(database) == {**num_deleted, **dict.fromkeys(OF_NOBODY, 0)}
    async with database.read() as connection:
        for table in METADATA.sorted_tables:
            if "tenant" in table.c:
                found = await connection.execute(select(table.c.tenant))
                assert list(found.scalars()) == ["bob"], table.name


async def test_the_bytes_of_files_are_deleted_whatever_the_state_of_the_file(
    database: Database, files: Files, erasure: Erasure, tmp_path: Path
) -> None:
    for is_hidden in (False, True):
        async with files.writing("alice", is_hidden=is_hidden) as draft:
            await draft.write(b"text")
    async with files.writing("bob") as kept:
        await kept.write(b"text")

    await erasure.erase("alice")

    assert [path.name for path in (tmp_path / "files").iterdir()] == [kept.id]
    async with database.read() as connection:
        assert list((await connection.execute(select(FILES.c.id))).scalars()) == [kept.id]


async def test_an_erasure_may_be_repeated(database: Database, erasure: Erasure) -> None:
    await fill(database, "alice")
    await erasure.erase("alice")

    assert set((await erasure.erase("alice")).values()) == {0}


async def test_a_file_that_was_being_written_during_an_erasure_leaves_nothing(
    files: Files, erasure: Erasure, tmp_path: Path
) -> None:
    async def write_during_an_erasure() -> None:
        async with files.writing("alice") as draft:
            await draft.write(b"text")
            await erasure.erase("alice")

    with pytest.raises(Unavailable):
        await write_during_an_erasure()

    assert list((tmp_path / "files").iterdir()) == []
