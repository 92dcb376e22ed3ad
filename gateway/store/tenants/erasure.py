"""Erases a tenant: every row of the database and every blob that belongs to it.

The schema determines the data of a tenant: the rows of tables with a column ``tenant``, and the
rows of tables that refer to them. A new table is therefore erased without any change here.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from sqlalchemy import ColumnElement, Table, select

from gateway.store.database import Database
from gateway.store.files.exact_answers import ExactAnswers
from gateway.store.files.records import Files
from gateway.store.schema import EXACT_ANSWERS, FILES, METADATA, USAGE

_ELSEWHERE = (FILES, EXACT_ANSWERS, USAGE)
"""The tables whose rows are deleted with their blobs, or later."""


class _Owned(NamedTuple):
    """The rows of a table that belong to a tenant."""

    table: Table
    condition: ColumnElement[bool]


class Erasure:
    """Erases tenants. Every method raises `Unavailable`."""

    def __init__(self, database: Database, files: Files, exact_answers: ExactAnswers) -> None:
        self._database = database
        self._files = files
        self._exact_answers = exact_answers

    async def erase(self, tenant: str) -> Mapping[str, int]:
        """Delete all stored data of a tenant, except for its usage records; returns how many rows
        of each table were deleted. The next erasure completes an interrupted erasure."""
        num_deleted = {
            FILES.name: await self._files.erase(tenant),
            EXACT_ANSWERS.name: await self._exact_answers.erase(tenant),
        }
        for table, condition in _owned_by(tenant):
            if not any(table is other for other in _ELSEWHERE):
                num_deleted[table.name] = await self._database.delete(table, condition)
        return num_deleted

    async def erase_usage(self, tenant: str) -> Mapping[str, int]:
        """Delete the usage records of a tenant, which name its requests: they are needed until
        the logs of the requests have been deleted."""
        return {USAGE.name: await self._database.delete(USAGE, USAGE.c.tenant == tenant)}


def _owned_by(tenant: str) -> Iterator[_Owned]:
    """The rows that belong to a tenant. Rows that refer to other rows come first: to delete a
    million rows together with the row that they refer to would exceed the time of a statement."""
    owned: dict[str, _Owned] = {}
    for table in METADATA.sorted_tables:  # those that others refer to come first
        if "tenant" in table.c:
            owned[table.name] = _Owned(table, table.c.tenant == tenant)
            continue
        for key in table.foreign_keys:
            parent = owned.get(key.column.table.name)
            if parent is not None:
                rows = select(key.column).where(parent.condition)
                owned[table.name] = _Owned(table, key.parent.in_(rows))
    return reversed(owned.values())
