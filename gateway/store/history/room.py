"""The room that each tenant has for its stored responses and conversations."""

import asyncio
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sqlalchemy import case, func, or_, select, union_all

from gateway.store.database import Database, uncancelled
from gateway.store.files.free_space import FreeSpace
from gateway.store.schema import CONVERSATIONS, RESPONSES
from shared.errors import Unavailable

_TABLES = (RESPONSES, CONVERSATIONS)
_MAX_SWEPT = 10_000
"""Objects of a tenant that are deleted at once. PostgreSQL takes at most 32,767 parameters."""
_SLACK = 64
"""The part of the limit that becomes free when it is reached, so that not every addition looks for
the oldest objects."""


class StoreLimits(NamedTuple):
    """The limits of the objects that are kept of a tenant."""

    retention_s: float
    max_objects: int
    """Responses and conversations."""
    max_bytes: int


@dataclass(slots=True)
class _Kept:
    """The stored bytes of a tenant, as far as this gateway knows."""

    num_bytes: int | None = None
    """At least the bytes that the tenant has; None if they were not counted since the last
    sweep."""
    shrinking: asyncio.Lock = field(default_factory=asyncio.Lock)


class TenantRoom:
    """The room of all tenants. A tenant whose room is full loses the responses and conversations
    that were not used for longest.

    Each gateway adds up the objects that it stores itself. The objects of other gateways and
    deletions are counted after the next sweep, and when the limit seems to be reached.
    """

    def __init__(
        self, database: Database, limits: StoreLimits, space: FreeSpace | None = None
    ) -> None:
        """``space`` is the free space of the database's disk."""
        self.limits = limits
        self.space = FreeSpace() if space is None else space
        self._database = database
        self._kept: defaultdict[str, _Kept] = defaultdict(_Kept)

    def expiry(self) -> int:
        """When an object that is stored or changed now expires."""
        return int(time.time() + self.limits.retention_s)

    async def take(self, tenant: str, num_bytes: int, newest: str) -> None:
        """Count the bytes that were just stored in the object with the id ``newest``, and delete
        the objects that it leaves no room for. A sweep makes up for it if the database cannot be
        reached."""
        kept = self._kept[tenant]
        if kept.num_bytes is not None:
            kept.num_bytes += num_bytes
            if kept.num_bytes <= self.limits.max_bytes:
                return
        with suppress(Unavailable):
            async with kept.shrinking:
                await self._shrink(tenant, kept, newest)

    async def sweep(self) -> None:
        """Delete expired responses and conversations. If a tenant has too many objects, also delete
        the objects that were not used for longest. Raises `Unavailable`."""
        now = int(time.time())
        for table in _TABLES:
            await self._database.delete(table, table.c.expires_at <= now)
        for tenant in await self._values(self._crowded_tenants()):
            await self._delete_surplus(tenant, self.limits.max_bytes)
        for kept in self._kept.values():
            kept.num_bytes = None

    async def _shrink(self, tenant: str, kept: _Kept, newest: str) -> None:
        max_bytes = self.limits.max_bytes
        if kept.num_bytes is not None and kept.num_bytes <= max_bytes:  # another addition did it
            return
        if await self._count(tenant, kept) > max_bytes:
            while await self._delete_surplus(tenant, max_bytes - max_bytes // _SLACK, newest):
                pass
            await self._count(tenant, kept)

    async def _count(self, tenant: str, kept: _Kept) -> int:
        before = kept.num_bytes or 0
        (total,) = await self._values(select(func.sum(_objects(tenant).c.num_bytes)))
        # Objects that are added meanwhile may be counted twice, but none are left out.
        kept.num_bytes = (kept.num_bytes or 0) - before + int(total or 0)
        return kept.num_bytes

    async def _delete_surplus(self, tenant: str, max_bytes: int, newest: str = "") -> bool:
        """Delete at most `_MAX_SWEPT` objects; returns whether there were any to delete."""
        surplus = await self._values(self._surplus(tenant, max_bytes, newest))
        for table in _TABLES if surplus else ():
            await self._database.delete(table, table.c.id.in_(surplus))
        return bool(surplus)

    @uncancelled
    async def _values(self, query: Any) -> list[Any]:
        async with self._database.read() as connection:
            return list((await connection.execute(query)).scalars())

    def _crowded_tenants(self) -> Any:
        objects = _objects()
        return (
            select(objects.c.tenant)
            .group_by(objects.c.tenant)
            .having(
                (func.count() > self.limits.max_objects)
                | (func.sum(objects.c.num_bytes) > self.limits.max_bytes)
            )
        )

    def _surplus(self, tenant: str, max_bytes: int, newest: str) -> Any:
        """The ids of the responses and conversations behind the newest that a tenant may have. The
        newest itself goes only if it does not fit into the whole room."""
        objects = _objects(tenant)
        # Several objects of one second expire together, so their times do not say which object is
        # the newest.
        is_older = case((objects.c.id == newest, 0), else_=1)
        order = (is_older, objects.c.expires_at.desc(), objects.c.id)
        ranked = select(
            objects.c.id,
            func.row_number().over(order_by=order).label("number"),
            func.sum(objects.c.num_bytes).over(order_by=order).label("total_bytes"),
        ).subquery()
        return (
            select(ranked.c.id)
            .where(
                or_(
                    ranked.c.number > self.limits.max_objects,
                    (ranked.c.total_bytes > max_bytes) & (ranked.c.number > 1),
                    ranked.c.total_bytes > self.limits.max_bytes,
                )
            )
            .limit(_MAX_SWEPT)
        )


def _objects(tenant: str | None = None) -> Any:
    """The responses and conversations of a tenant, or of all tenants."""
    columns = ("tenant", "id", "expires_at", "num_bytes")
    queries = (select(*(table.c[name] for name in columns)) for table in _TABLES)
    if tenant is not None:
        queries = (query.where(query.selected_columns.tenant == tenant) for query in queries)
    return union_all(*queries).subquery()
