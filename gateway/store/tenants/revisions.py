"""Whether a table has changed, which gateways ask again and again."""

import time
from typing import NamedTuple

from sqlalchemy import Table, func, select

from gateway.store.database import Database

LOOK_INTERVAL_S = 2.0
"""Seconds after which a gateway asks again whether another gateway has changed a table."""


class TableVersion(NamedTuple):
    """Differs whenever any row was added, changed or removed."""

    num_rows: int
    revision: int


async def version_of(database: Database, table: Table) -> TableVersion:
    """The version of a table with a column ``revision``. Raises `Unavailable`."""
    query = select(func.count(), func.coalesce(func.max(table.c.revision), 0))
    async with database.read() as connection:
        num_rows, revision = (await connection.execute(query)).one()
    return TableVersion(num_rows, int(revision))


def new_revision() -> int:
    """A revision that is larger than the revision of each earlier change, even of a row that was
    removed since."""
    return time.time_ns()
