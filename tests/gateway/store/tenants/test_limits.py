"""The limits of tenants in the database."""

import asyncio
from itertools import pairwise
from typing import Any

from msgspec import structs
from sqlalchemy import insert

from gateway.intake.keys.tenant_limits import TenantLimits
from gateway.store.database import Database
from gateway.store.schema import TENANTS
from gateway.store.tenants.limits import StoredLimits


async def limit(stored: StoredLimits, tenant: str, **changes: Any) -> TenantLimits:
    return await stored.change(tenant, lambda old: structs.replace(old, **changes))


async def test_limits_are_what_was_stored_until_they_are_changed(
    stored_limits: StoredLimits,
) -> None:
    await limit(stored_limits, "alice", max_concurrent=3, tokens_per_minute=9)
    changed = await limit(stored_limits, "alice", max_concurrent=None)
    await limit(stored_limits, "bob", max_detached=1)

    assert changed == TenantLimits(tokens_per_minute=9)
    assert await stored_limits.all() == {"alice": changed, "bob": TenantLimits(max_detached=1)}


async def test_every_change_makes_another_version(stored_limits: StoredLimits) -> None:
    versions = [await stored_limits.version()]
    for tenant, num in (("alice", 1), ("alice", 2), ("bob", 1), ("alice", None)):
        await limit(stored_limits, tenant, max_detached=num)
        versions.append(await stored_limits.version())

    assert [before for before, after in pairwise(versions) if before == after] == []


async def test_changes_at_the_same_time_lose_nothing(stored_limits: StoredLimits) -> None:
    await asyncio.gather(
        limit(stored_limits, "alice", max_detached=1),
        limit(stored_limits, "alice", max_concurrent=2),
    )

    assert await stored_limits.all() == {"alice": TenantLimits(max_detached=1, max_concurrent=2)}


async def test_limits_that_cannot_be_read_leave_the_others(
    stored_limits: StoredLimits, database: Database
) -> None:
    await limit(stored_limits, "alice", max_detached=1)
    async with database.begin() as connection:
        row = {"tenant": "bob", "limits": {"max_detached": "many"}, "revision": 1}
        await connection.execute(insert(TENANTS).values(row))

    assert await stored_limits.all() == {"alice": TenantLimits(max_detached=1)}
