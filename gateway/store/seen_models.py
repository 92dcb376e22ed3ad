"""The models that gateways have seen, so that a gateway that starts can watch their queues."""

from collections.abc import Mapping

from sqlalchemy import delete, select
from sqlalchemy.dialects import postgresql, sqlite

from gateway.store.database import Database, uncancelled
from gateway.store.schema import MODELS


class SeenModels:
    """The Unix time at which each model was last seen by any gateway. Every method raises
    `Unavailable`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @uncancelled
    async def write(self, seen: Mapping[str, float]) -> None:
        """Write when models were seen. A time does not replace a later time."""
        insert = sqlite.insert if self._database.is_sqlite else postgresql.insert
        statement = insert(MODELS)
        new = statement.excluded
        upsert = statement.on_conflict_do_update(
            index_elements=("name",),
            set_={"seen_at": new.seen_at},
            where=new.seen_at > MODELS.c.seen_at,
        )
        # All gateways use the same order, because PostgreSQL locks one row after the other.
        rows = [{"name": name, "seen_at": seen[name]} for name in sorted(seen)]
        async with self._database.begin() as connection:
            await connection.execute(upsert, rows)

    @uncancelled
    async def all(self) -> dict[str, float]:
        """When each model was seen."""
        async with self._database.read() as connection:
            rows = await connection.execute(select(MODELS.c.name, MODELS.c.seen_at))
            return {row.name: row.seen_at for row in rows}

    @uncancelled
    async def sweep(self, before: float) -> None:
        """Delete the models that were not seen since this time."""
        async with self._database.begin() as connection:
            await connection.execute(delete(MODELS).where(MODELS.c.seen_at < before))
