"""The API keys and the limits of tenants in the database, at a gateway: read again whenever any
gateway has changed them, so that no request waits for the database, and changed for operators."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

from msgspec import structs

from gateway.intake.keys.accepted import Keys
from gateway.intake.keys.api_key import ApiKey, new_key, rotated
from gateway.intake.keys.tenant_limits import TenantLimits
from gateway.store.state import Store
from gateway.store.tenants.keys import StoredKeys
from gateway.store.tenants.revisions import LOOK_INTERVAL_S, TableVersion
from shared.errors import Conflict, NotFound, Unavailable


class KeyDirectory:
    """Keeps the keys that a gateway accepts, and the limits of tenants, equal to the keys and
    limits of the database.

    Operators begin with a key of the file, so a gateway without a file of keys, which requires no
    key, has no keys of the database either.
    """

    def __init__(
        self, store: Store, keys: Keys, *, look_interval_s: float = LOOK_INTERVAL_S
    ) -> None:
        self._look_interval_s = look_interval_s
        self._store = store
        self._keys = keys
        self._version: tuple[TableVersion, TableVersion] | None = None
        self._reading = asyncio.Lock()
        if keys.are_needed and store.is_in_use:
            keys.expect_stored()

    async def read_first(self) -> None:
        """Read the keys before the first request comes, if the database answers."""
        if self._keys.are_needed:
            await self._store.read_first(self.refresh, "API keys")

    async def run(self) -> None:
        """Read the keys again whenever they have changed; never returns."""
        if not self._keys.are_needed:
            await asyncio.Event().wait()
        await self._store.keep_read(self.refresh, self._look_interval_s)

    async def refresh(self) -> None:
        """Read keys and limits if any have changed. Raises `Unavailable`."""
        async with self._reading:
            state = await self._store.open()
            version = await state.keys.version(), await state.limits.version()
            if version == self._version:
                self._keys.confirm_stored()
                return
            self._keys.accept_stored(await state.keys.all(), await state.limits.all())
            self._version = version

    async def add(self, tenant: str, options: dict[str, Any]) -> tuple[str, ApiKey]:
        """Create a key; returns its secret, too, which is shown once. ``options`` are fields of
        `ApiKey`. Raises `Conflict` and `Unavailable`."""
        secret, key = new_key(tenant, **options)
        await (await self._stored()).add(key)
        await self._refresh_if_possible()
        return secret, key

    async def change(self, key_id: str, options: dict[str, Any]) -> ApiKey:
        """Replace fields of a key. Raises `NotFound`, `Conflict` and `Unavailable`."""
        stored = await self._stored(key_id)
        key = await stored.change(key_id, lambda old: replace(old, **options))
        await self._refresh_if_possible()
        return key

    async def rotate(self, key_id: str, grace: timedelta) -> tuple[str, ApiKey]:
        """Replace the secret of a key; the old secret remains valid for ``grace``. Raises the
        errors of `change`."""
        secret = ""

        def rotate(old: ApiKey) -> ApiKey:
            nonlocal secret
            secret, key = rotated(old, grace)
            return key

        key = await (await self._stored(key_id)).change(key_id, rotate)
        await self._refresh_if_possible()
        return secret, key

    async def revoke(self, key_id: str) -> ApiKey:
        """Remove a key. Raises like `change`."""
        key = await (await self._stored(key_id)).remove(key_id)
        await self._refresh_if_possible()
        return key

    async def limit(self, tenant: str, changes: Mapping[str, Any]) -> TenantLimits:
        """Replace some of a tenant's limits, which are returned. Raises `Conflict` and
        `Unavailable`."""
        self._require_keys()
        stored = (await self._store.open()).limits
        limits = await stored.change(tenant, lambda old: structs.replace(old, **changes))
        await self._refresh_if_possible()
        return limits

    def _require_keys(self) -> None:
        """Raises `Conflict` if the stored keys and tenants have no effect here."""
        if not self._keys.are_needed:
            raise Conflict(
                "This gateway requires no API keys. Start it with WARREN_KEYS_FILE and a key of "
                "the scope operator."
            )

    async def _stored(self, key_id: str = "") -> StoredKeys:
        """Raises `Conflict` if a key of this gateway's database has no effect."""
        self._require_keys()
        if self._keys.is_in_file(key_id):
            raise Conflict(
                f"The API key {key_id} is in the file of keys. Change it there, with `warren keys "
                "--keys-file`."
            )
        return (await self._store.open()).keys

    async def _refresh_if_possible(self) -> None:
        """Let the change take effect here at once, and at the other gateways soon."""
        with suppress(Unavailable, NotFound):  # it is changed; `run` reads it later
            await self.refresh()
