"""The API keys in the database, each in the format of its line in a file of keys."""

import logging
from collections.abc import Callable

from sqlalchemy import delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.intake.keys.api_key import ApiKey, parse_line
from gateway.store.database import Database, uncancelled
from gateway.store.schema import API_KEYS
from gateway.store.tenants.revisions import TableVersion, new_revision, version_of
from shared.errors import NotFound

logger = logging.getLogger(__name__)


class StoredKeys:
    """The keys of all tenants. Every method raises `Unavailable`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @uncancelled
    async def version(self) -> TableVersion:
        return await version_of(self._database, API_KEYS)

    @uncancelled
    async def all(self) -> dict[str, ApiKey]:
        """All keys by id, the oldest changes first. A key that only a newer version understands is
        left out, and logged."""
        query = select(API_KEYS.c.id, API_KEYS.c.line).order_by(API_KEYS.c.revision)
        keys = {}
        async with self._database.read() as connection:
            for row in await connection.execute(query):
                try:
                    key = parse_line(row.line)
                except ValueError as error:
                    fields = {"key_id": row.id, "reason": str(error)}
                    logger.error("API key not readable", extra=fields)  # noqa: TRY400
                else:
                    if key is not None:
                        keys[key.key_id] = key
        return keys

    @uncancelled
    async def add(self, key: ApiKey) -> None:
        values = {
            "id": key.key_id,
            "tenant": key.tenant,
            "line": key.line,
            "revision": new_revision(),
        }
        async with self._database.begin() as connection:
            await connection.execute(insert(API_KEYS).values(values))

    @uncancelled
    async def change(self, key_id: str, change: Callable[[ApiKey], ApiKey]) -> ApiKey:
        """Replace a key by the result of ``change``, which is returned. Raises `NotFound`, and the
        errors of ``change``."""
        async with self._database.begin() as connection:
            key = change(await _locked(connection, key_id))
            values = {"line": key.line, "revision": new_revision()}
            await connection.execute(update(API_KEYS).where(API_KEYS.c.id == key_id).values(values))
        return key

    @uncancelled
    async def remove(self, key_id: str) -> ApiKey:
        """Remove a key, which is returned. Raises `NotFound`."""
        async with self._database.begin() as connection:
            key = await _locked(connection, key_id)
            await connection.execute(delete(API_KEYS).where(API_KEYS.c.id == key_id))
        return key


async def _locked(connection: AsyncConnection, key_id: str) -> ApiKey:
    """The key, which nobody else changes until the transaction ends. Raises `NotFound`."""
    query = select(API_KEYS.c.line).where(API_KEYS.c.id == key_id).with_for_update()
    line = (await connection.execute(query)).scalar_one_or_none()
    key = None if line is None else parse_line(line)
    if key is None:
        raise NotFound(f"No such API key in the database: {key_id[:64]}", param="key_id")
    return key
