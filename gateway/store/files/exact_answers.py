"""The answers of executions that equal requests share, for a limited time and up to a size."""

from typing import NamedTuple

from sqlalchemy import Select, and_, func, select
from sqlalchemy.dialects import postgresql, sqlite

from gateway.store.database import Database, uncancelled
from gateway.store.files.blobs import Blobs
from gateway.store.schema import EXACT_ANSWERS

_MAX_IN_ROW = 64 << 10
"""Bytes. Larger answers are blobs."""
_MAX_SWEPT = 1000
"""Answers that a sweep deletes at once."""


class ExactAnswer(NamedTuple):
    execution_id: str
    tenant: str
    body: bytes
    created_at: float
    expires_at: float


class ExactAnswers:
    """Small answers are in the database, and large answers beside the files. Every method raises
    `Unavailable`."""

    def __init__(self, database: Database, blobs: Blobs) -> None:
        self._database = database
        self._blobs = blobs

    async def write(self, answer: ExactAnswer) -> None:
        """Store an answer, unless the execution has an answer that has not expired: then both are
        equal."""
        if await self._is_expired(answer.execution_id, answer.created_at):
            await self._delete([answer.execution_id])
        is_small = len(answer.body) <= _MAX_IN_ROW
        # The row comes first, so that a process that dies leaves no blob without a row.
        await self._insert(answer, answer.body if is_small else None)
        if not is_small:
            async with self._blobs.writer(_blob_of(answer.execution_id)) as writer:
                await writer.write(answer.body)

    async def read(self, execution_id: str, now: float) -> bytes | None:
        """The answer of an execution; None if there is none that has not expired."""
        row = await self._row(execution_id, now)
        if row is None:
            return None
        if (body := row[0]) is not None:
            return body
        try:
            return b"".join([part async for part in self._blobs.parts(_blob_of(execution_id))])
        except FileNotFoundError:  # it was just swept, or is being written
            return None

    async def sweep(self, now: float, max_bytes: int) -> int:
        """Delete answers that have expired, and the oldest answers until the others have at most
        ``max_bytes``; returns how many were deleted."""
        num_deleted = 0
        while expired := await self._expired(now):
            num_deleted += await self._delete(expired)
        while (num_over := await self.num_bytes() - max_bytes) > 0:
            num_deleted += await self._delete(await self._oldest(num_over))
        return num_deleted

    async def erase(self, tenant: str) -> int:
        """Delete all answers of a tenant; returns how many."""
        num_deleted = 0
        while ids := await self._ids_of(tenant):
            num_deleted += await self._delete(ids)
        return num_deleted

    @uncancelled
    async def num_bytes(self) -> int:
        """The size of all answers."""
        async with self._database.read() as connection:
            total = await connection.scalar(select(func.sum(EXACT_ANSWERS.c.num_bytes)))
            return int(total or 0)

    @uncancelled
    async def _insert(self, answer: ExactAnswer, body: bytes | None) -> None:
        insert = sqlite.insert if self._database.is_sqlite else postgresql.insert
        statement = insert(EXACT_ANSWERS).on_conflict_do_nothing()
        row = {**answer._asdict(), "body": body, "num_bytes": len(answer.body)}
        async with self._database.begin() as connection:
            await connection.execute(statement, row)

    @uncancelled
    async def _row(self, execution_id: str, now: float) -> tuple[bytes | None] | None:
        query = select(EXACT_ANSWERS.c.body).where(
            EXACT_ANSWERS.c.execution_id == execution_id, EXACT_ANSWERS.c.expires_at > now
        )
        async with self._database.read() as connection:
            row = (await connection.execute(query)).first()
            return None if row is None else (row.body,)

    async def _is_expired(self, execution_id: str, now: float) -> bool:
        """Whether the execution has an answer that has expired and was not swept yet."""
        table = EXACT_ANSWERS.c
        condition = and_(table.execution_id == execution_id, table.expires_at <= now)
        return bool(await self._ids(select(table.execution_id).where(condition)))

    async def _expired(self, now: float) -> list[str]:
        condition = EXACT_ANSWERS.c.expires_at <= now
        return await self._ids(select(EXACT_ANSWERS.c.execution_id).where(condition))

    async def _ids_of(self, tenant: str) -> list[str]:
        condition = EXACT_ANSWERS.c.tenant == tenant
        return await self._ids(select(EXACT_ANSWERS.c.execution_id).where(condition))

    @uncancelled
    async def _oldest(self, num_bytes: int) -> list[str]:
        """The oldest answers, which have ``num_bytes`` together if they are not too many."""
        table = EXACT_ANSWERS.c
        query = select(table.execution_id, table.num_bytes).order_by(table.created_at)
        ids = []
        async with self._database.read() as connection:
            for row in await connection.execute(query.limit(_MAX_SWEPT)):
                ids.append(row.execution_id)
                num_bytes -= row.num_bytes
                if num_bytes <= 0:
                    break
        return ids

    @uncancelled
    async def _ids(self, query: Select[tuple[str]]) -> list[str]:
        async with self._database.read() as connection:
            return list(await connection.scalars(query.limit(_MAX_SWEPT)))

    async def _delete(self, ids: list[str]) -> int:
        table = EXACT_ANSWERS.c
        are_large = select(table.execution_id).where(
            table.execution_id.in_(ids), table.body.is_(None)
        )
        for execution_id in await self._ids(are_large):
            await self._blobs.delete(_blob_of(execution_id))
        return await self._database.delete(EXACT_ANSWERS, table.execution_id.in_(ids))


def _blob_of(execution_id: str) -> str:
    return f"exact-{execution_id}"
