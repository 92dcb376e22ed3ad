"""The limits of tenants in the database."""

import logging
from collections.abc import Callable

import msgspec
from sqlalchemy import Executable, select
from sqlalchemy.dialects import postgresql, sqlite

from gateway.intake.keys.tenant_limits import NO_LIMITS, TenantLimits
from gateway.store.database import Database, uncancelled
from gateway.store.schema import TENANTS
from gateway.store.tenants.revisions import TableVersion, new_revision, version_of

logger = logging.getLogger(__name__)

_CHANGE_LOCK = 0x4C494D49
"""Without this lock, two changes of a tenant's limits that have no row yet would each miss the
other."""


class StoredLimits:
    """The limits of all tenants that were ever limited. Every method raises `Unavailable`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @uncancelled
    async def version(self) -> TableVersion:
        return await version_of(self._database, TENANTS)

    @uncancelled
    async def all(self) -> dict[str, TenantLimits]:
        """The limits by tenant. Limits that cannot be read are left out, and logged."""
        limits = {}
        async with self._database.read() as connection:
            for row in await connection.execute(select(TENANTS.c.tenant, TENANTS.c.limits)):
                try:
                    limits[row.tenant] = msgspec.convert(row.limits, TenantLimits)
                except msgspec.ValidationError as error:
                    fields = {"tenant": row.tenant, "reason": str(error)}
                    logger.error("limits of a tenant not readable", extra=fields)  # noqa: TRY400
        return limits

    @uncancelled
    async def change(
        self, tenant: str, change: Callable[[TenantLimits], TenantLimits]
    ) -> TenantLimits:
        """Replace the limits of a tenant by the result of ``change``, which is returned."""
        known = select(TENANTS.c.limits).where(TENANTS.c.tenant == tenant)
        async with self._database.begin() as connection:
            await self._database.hold(connection, _CHANGE_LOCK, tenant)
            old = (await connection.execute(known)).scalar_one_or_none()
            limits = change(NO_LIMITS if old is None else msgspec.convert(old, TenantLimits))
            await connection.execute(self._upsert(tenant, limits))
        return limits

    def _upsert(self, tenant: str, limits: TenantLimits) -> Executable:
        insert = sqlite.insert if self._database.is_sqlite else postgresql.insert
        values = {"limits": msgspec.to_builtins(limits), "revision": new_revision()}
        statement = insert(TENANTS).values(tenant=tenant, **values)
        return statement.on_conflict_do_update(index_elements=("tenant",), set_=values)
