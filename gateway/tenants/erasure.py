"""Erases a tenant: its work, its logs and dead letters at the broker, and all its stored data.

Each step may be repeated, so the next erasure completes an interrupted erasure. Usage records are
deleted last, because they name the requests whose logs the broker may still have.
"""

import asyncio
import re
import time
from contextlib import suppress
from typing import NamedTuple

from gateway.intake.keys.accepted import Keys
from gateway.log.registry import Relays
from gateway.store.batches import Batches
from gateway.store.state import Store, StoredState
from gateway.tenants.stopping import WorkStopper
from shared import dead_letters, topology
from shared.bus.base import Bus, Message
from shared.messages import Release, StopWork, encode
from shared.settings import GatewaySettings

_BATCHES_END_WITHIN_S = 10.0
_LOOK_INTERVAL_S = 0.1
_MAX_DELETED_AT_ONCE = 8
_OF_GATEWAY = re.compile(r"[a-z]{1,16}[-_][A-Za-z0-9_-]{1,110}")
"""The ids of the requests of gateways. The logs of publishers have other names, and are theirs."""


class ErasedData(NamedTuple):
    """The numbers of the objects that an erasure has deleted."""

    num_rows: dict[str, int]
    """By table."""
    num_logs: int
    """Logs of requests that the broker was told to delete."""
    num_dead_letters: int


class TenantErasure:
    """Erases tenants, one at a time at this gateway."""

    def __init__(
        self,
        bus: Bus,
        store: Store,
        relays: Relays,
        stopper: WorkStopper,
        keys: Keys,
        settings: GatewaySettings,
        listing_letters: asyncio.Lock,
        reply_retention_s: float,
    ) -> None:
        """``listing_letters`` is held by each reader of the dead letters, because a reader hides
        them from the others. ``reply_retention_s``: how long the broker keeps logs without a
        reader."""
        self._bus = bus
        self._store = store
        self._relays = relays
        self._stopper = stopper
        self._keys = keys
        self._settings = settings
        self._reply_retention_s = reply_retention_s
        self._listing_letters = listing_letters
        self._turn = asyncio.Lock()

    def keys_of(self, tenant: str) -> list[str]:
        """The ids of the tenant's keys that are in force. With such a key, new requests would
        store new data during the erasure."""
        return [key.key_id for key in self._keys.known if key.tenant == tenant]

    async def erase(self, tenant: str) -> ErasedData:
        """Erase a tenant that has no key. Raises `Unavailable` and `BusError`."""
        async with self._turn:
            state = await self._store.open()
            await self._stop_work(tenant, state.batches)
            async with self._listing_letters:
                num_letters = await dead_letters.drop_of(
                    self._bus, tenant, self._settings.trusted_users
                )
            num_rows = dict(await state.erasure.erase(tenant))
            num_logs = await self._delete_logs(tenant, state)
            num_rows |= await state.erasure.erase_usage(tenant)
            return ErasedData(num_rows, num_logs, num_letters)

    async def _stop_work(self, tenant: str, batches: Batches) -> None:
        """Cancel all requests and batches of the tenant, and wait for their end."""
        await self._stopper.stop(StopWork(tenant=tenant), batches)
        with suppress(TimeoutError):  # the gateway that runs a batch may be gone
            async with asyncio.timeout(_BATCHES_END_WITHIN_S):
                while unended := await batches.unended(tenant):
                    command = Release(request_id=unended[0])
                    await self._bus.publish(topology.ALL_GATEWAYS, Message(encode(command)))
                    await asyncio.sleep(_LOOK_INTERVAL_S)
        await asyncio.sleep(self._stopper.settled_s)

    async def _delete_logs(self, tenant: str, state: StoredState) -> int:
        """Delete the logs that the broker keeps of requests that have ended; returns how many
        requests might have had a log."""
        settings = self._settings
        kept_s = settings.request_timeout_s + max(settings.detach_ttl_s, self._reply_retention_s)
        num_logs = 0
        slots = asyncio.Semaphore(_MAX_DELETED_AT_ONCE)

        async def delete(request_id: str) -> None:
            async with slots:
                await self._relays.delete_log(request_id)

        async for page in state.usage.request_ids(tenant, since=time.time() - kept_s):
            request_ids = list(filter(_OF_GATEWAY.fullmatch, page))
            async with asyncio.TaskGroup() as tasks:
                for request_id in request_ids:
                    tasks.create_task(delete(request_id))
            num_logs += len(request_ids)
        return num_logs
