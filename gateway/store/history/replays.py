"""The reports of `warren replay`: how the answers of another model compare with stored answers."""

import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import delete, insert, select

from gateway.store.database import Database, uncancelled
from gateway.store.schema import REPLAYS

_MAX_KEPT = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRecord:
    id: str
    tenant: str
    created_at: float
    """Unix time in seconds."""
    report: Mapping[str, Any]
    """A `gateway.api.routes.replays.ReplayReport`."""


class Replays:
    """The newest reports of each tenant, ``max_kept`` at most. Every method raises
    `Unavailable`."""

    def __init__(self, database: Database, max_kept: int = _MAX_KEPT) -> None:
        self._database = database
        self._max_kept = max_kept

    @uncancelled
    async def add(self, tenant: str, report: Mapping[str, Any]) -> ReplayRecord:
        """Keep a report, in place of the tenant's oldest report if there are too many."""
        record = ReplayRecord(
            id=f"replay_{secrets.token_hex(16)}",
            tenant=tenant,
            created_at=time.time(),
            report=report,
        )
        is_of_tenant = REPLAYS.c.tenant == tenant
        of_tenant = select(REPLAYS.c.id).where(is_of_tenant)
        kept = of_tenant.order_by(*_NEWEST_FIRST).limit(self._max_kept)
        async with self._database.begin() as connection:
            await connection.execute(insert(REPLAYS).values(asdict(record)))
            await connection.execute(delete(REPLAYS).where(is_of_tenant, REPLAYS.c.id.not_in(kept)))
        return record

    @uncancelled
    async def newest(self, limit: int) -> list[ReplayRecord]:
        """The newest reports of all tenants, the newest first."""
        query = select(REPLAYS).order_by(*_NEWEST_FIRST).limit(limit)
        async with self._database.read() as connection:
            return [ReplayRecord(**row._mapping) for row in await connection.execute(query)]


_NEWEST_FIRST = (REPLAYS.c.created_at.desc(), REPLAYS.c.id.desc())
