"""The sessions of the console that have ended before their time."""

from sqlalchemy import delete, select
from sqlalchemy.dialects import postgresql, sqlite

from gateway.store.database import Database, uncancelled
from gateway.store.schema import ENDED_SESSIONS
from gateway.store.tenants.revisions import TableVersion, new_revision, version_of


class StoredEndings:
    """When the sessions of each subject have ended. Every method raises `Unavailable`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @uncancelled
    async def version(self) -> TableVersion:
        return await version_of(self._database, ENDED_SESSIONS)

    @uncancelled
    async def all(self) -> dict[str, float]:
        """The Unix times until which sessions have ended, by their subjects."""
        query = select(ENDED_SESSIONS.c.subject, ENDED_SESSIONS.c.ended_at)
        async with self._database.read() as connection:
            return {row.subject: row.ended_at for row in await connection.execute(query)}

    @uncancelled
    async def end(self, subject: str, ended_at: float) -> None:
        """The sessions of ``subject`` that began until ``ended_at`` have ended. A later ending
        that is stored stays, because a gateway may write an ending long after it has happened."""
        insert = sqlite.insert if self._database.is_sqlite else postgresql.insert
        values = {"ended_at": ended_at, "revision": new_revision()}
        statement = insert(ENDED_SESSIONS).values(subject=subject, **values)
        statement = statement.on_conflict_do_update(
            index_elements=("subject",), set_=values, where=ENDED_SESSIONS.c.ended_at < ended_at
        )
        async with self._database.begin() as connection:
            await connection.execute(statement)

    @uncancelled
    async def forget(self, ended_before: float) -> None:
        """Delete endings from so long ago that their sessions have expired anyway."""
        statement = delete(ENDED_SESSIONS).where(ENDED_SESSIONS.c.ended_at < ended_before)
        async with self._database.begin() as connection:
            await connection.execute(statement)
