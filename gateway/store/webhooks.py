"""Webhooks: the endpoints of tenants, and the deliveries to them that are due or dead.

A delivery is written in the transaction of the change that it announces, and deleted once its
endpoint has accepted it. One gateway tries it at a time: a claim counts the try and holds a lease,
and results of an older try are ignored. A delivery that has failed too often is dead: it is kept,
and can be retried by an operator.
"""

import base64
import secrets
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from sqlalchemy import Select, delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.store.database import Database, uncancelled
from gateway.store.schema import DELIVERIES, WEBHOOKS
from shared.errors import NotFound

EventType: TypeAlias = Literal[
    "batch.completed",
    "batch.failed",
    "batch.expired",
    "batch.cancelled",
    "response.completed",
    "response.failed",
    "response.cancelled",
    "response.incomplete",
]
EVENT_TYPES: tuple[EventType, ...] = get_args(EventType)

OVERLAP_S = 24 * 3600
"""Seconds for which a secret that was replaced may stay active."""
_SECRET_BYTES = 32
_MAX_REASON_CHARS = 256
_DEAD_RETENTION_S = 30 * 24 * 3600
"""Seconds after its event for which a dead delivery is kept at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """An endpoint of a tenant. Times are Unix times in seconds."""

    id: str
    tenant: str
    name: str
    url: str
    event_types: Sequence[str]
    created_at: int
    updated_at: int
    secret: str = field(repr=False)
    """With the prefix ``whsec_``."""
    old_secret: str | None = field(repr=False)
    """The secret before the current secret. It is active until ``old_secret_until``."""
    old_secret_until: int | None

    def active_secrets(self, now: float) -> list[str]:
        """The secrets that sign, the current secret first."""
        if self.old_secret is None or (self.old_secret_until or 0) <= now:
            return [self.secret]
        return [self.secret, self.old_secret]


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookDelivery:
    """An event on its way to an endpoint."""

    id: str
    event_id: str
    """The same for all endpoints."""
    type: str
    object_id: str
    """The id of the object that the event is about."""
    created_at: int
    """When the event occurred; Unix time in seconds."""
    num_tries: int
    reason: str | None
    """Why the last try failed."""
    webhook: Webhook


async def announce(
    connection: AsyncConnection, tenant: str, event_type: EventType, object_id: str
) -> None:
    """Write the deliveries of an event to the endpoints of its tenant, within the transaction of
    the change that the event announces."""
    # An endpoint must not be deleted before the transaction ends.
    query = (
        select(WEBHOOKS.c.id, WEBHOOKS.c.event_types)
        .where(WEBHOOKS.c.tenant == tenant)
        .with_for_update(read=True, key_share=True)
    )
    event_id, now = f"evt_{secrets.token_hex(16)}", time.time()
    deliveries = [
        {
            "id": f"delivery_{secrets.token_hex(16)}",
            "webhook_id": row.id,
            "event_id": event_id,
            "type": event_type,
            "object_id": object_id,
            "created_at": int(now),
            "num_tries": 0,
            "due_at": now,
        }
        for row in await connection.execute(query)
        if event_type in row.event_types
    ]
    if deliveries:
        await connection.execute(insert(DELIVERIES), deliveries)


class Webhooks:
    """The webhooks of all tenants. Every method raises `Unavailable`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @uncancelled
    async def add(
        self, *, tenant: str, name: str, url: str, event_types: Sequence[EventType]
    ) -> Webhook:
        """Add an endpoint, with a new secret."""
        now = int(time.time())
        webhook = Webhook(
            id=f"webhook_{secrets.token_hex(16)}",
            tenant=tenant,
            name=name,
            url=url,
            event_types=list(event_types),
            created_at=now,
            updated_at=now,
            secret=_new_secret(),
            old_secret=None,
            old_secret_until=None,
        )
        values = {name: getattr(webhook, name) for name in WEBHOOKS.c.keys()}  # noqa: SIM118
        async with self._database.begin() as connection:
            await connection.execute(insert(WEBHOOKS).values(values))
        return webhook

    @uncancelled
    async def all(self, tenant: str | None = None) -> list[Webhook]:
        """The endpoints of a tenant or of all tenants, oldest first."""
        query = select(WEBHOOKS).order_by(WEBHOOKS.c.created_at, WEBHOOKS.c.id)
        if tenant is not None:
            query = query.where(WEBHOOKS.c.tenant == tenant)
        async with self._database.read() as connection:
            return [Webhook(**row._mapping) for row in await connection.execute(query)]

    @uncancelled
    async def get(self, webhook_id: str) -> Webhook:
        """Raises `NotFound`."""
        async with self._database.read() as connection:
            return await _webhook(connection, webhook_id)

    @uncancelled
    async def change(self, webhook_id: str, **values: Any) -> Webhook:
        """Change the name, the URL or the event types. Raises `NotFound`."""
        async with self._database.begin() as connection:
            return await _update(connection, webhook_id, **values)

    @uncancelled
    async def rotate(self, webhook_id: str, *, overlap_s: int) -> Webhook:
        """Replace the secret. The current secret stays active for ``overlap_s`` seconds; an older
        secret does not. Raises `NotFound`."""
        async with self._database.begin() as connection:
            current = await _webhook(connection, webhook_id, is_locked=True)
            return await _update(
                connection,
                webhook_id,
                secret=_new_secret(),
                old_secret=current.secret if overlap_s else None,
                old_secret_until=int(time.time()) + overlap_s if overlap_s else None,
            )

    @uncancelled
    async def remove(self, webhook_id: str) -> None:
        """Remove an endpoint and its deliveries. Raises `NotFound`."""
        async with self._database.begin() as connection:
            statement = delete(WEBHOOKS).where(WEBHOOKS.c.id == webhook_id)
            if not (await connection.execute(statement)).rowcount:
                raise _no_webhook(webhook_id)

    @uncancelled
    async def claim(self, busy: Collection[str], lease_s: float) -> WebhookDelivery | None:
        """Claim the delivery that is due for longest, if there is any to an endpoint that is not
        among ``busy``, and count the try."""
        now, skipped = time.time(), list(busy)
        async with self._database.begin() as connection:
            delivery_id = None
            while delivery_id is None:
                first = _due_first(skipped, now)
                webhook_id = (await connection.execute(first)).scalar_one_or_none()
                if webhook_id is None:
                    return None
                oldest = _oldest_due(webhook_id, now)
                delivery_id = (await connection.execute(oldest)).scalar_one_or_none()
                skipped.append(webhook_id)  # unless another gateway is claiming its only delivery
            await connection.execute(
                update(DELIVERIES)
                .where(DELIVERIES.c.id == delivery_id)
                .values(num_tries=DELIVERIES.c.num_tries + 1, due_at=now + lease_s)
            )
            found = select(DELIVERIES).where(DELIVERIES.c.id == delivery_id)
            return await _delivery(connection, (await connection.execute(found)).one())

    @uncancelled
    async def delivered(self, delivery: WebhookDelivery) -> None:
        """The endpoint has accepted the delivery that was claimed."""
        async with self._database.begin() as connection:
            await connection.execute(delete(DELIVERIES).where(_is_try(delivery)))

    @uncancelled
    async def failed(self, delivery: WebhookDelivery, reason: str, retry_at: float | None) -> None:
        """The try that was claimed has failed. Without ``retry_at`` the delivery is dead, and old
        dead deliveries of its endpoint are forgotten."""
        values = {"reason": reason[:_MAX_REASON_CHARS], "due_at": retry_at}
        async with self._database.begin() as connection:
            await connection.execute(update(DELIVERIES).where(_is_try(delivery)).values(values))
            if retry_at is None:
                is_old = DELIVERIES.c.created_at < int(time.time()) - _DEAD_RETENTION_S
                await connection.execute(
                    delete(DELIVERIES).where(
                        DELIVERIES.c.webhook_id == delivery.webhook.id,
                        DELIVERIES.c.due_at.is_(None),
                        DELIVERIES.c.id != delivery.id,
                        is_old,
                    )
                )

    @uncancelled
    async def expire(self, before: float) -> int:
        """Give up the deliveries that have been due since before this time; returns how many."""
        values = {"reason": "not tried in time", "due_at": None}
        statement = update(DELIVERIES).where(DELIVERIES.c.due_at < before).values(values)
        async with self._database.begin() as connection:
            return int((await connection.execute(statement)).rowcount)

    @uncancelled
    async def dead(self, limit: int) -> list[WebhookDelivery]:
        """The oldest dead deliveries."""
        query = (
            select(DELIVERIES)
            .where(DELIVERIES.c.due_at.is_(None))
            .order_by(DELIVERIES.c.created_at, DELIVERIES.c.id)
            .limit(limit)
        )
        deliveries = []
        async with self._database.read() as connection:
            for row in (await connection.execute(query)).all():
                with suppress(NotFound):  # its webhook was removed meanwhile, and so were they
                    deliveries.append(await _delivery(connection, row))
        return deliveries

    @uncancelled
    async def retry(self, delivery_id: str) -> None:
        """Make a dead delivery due, with all its tries. Raises `NotFound`."""
        statement = (
            update(DELIVERIES)
            .where(DELIVERIES.c.id == delivery_id, DELIVERIES.c.due_at.is_(None))
            .values(due_at=time.time(), num_tries=0)
        )
        async with self._database.begin() as connection:
            if not (await connection.execute(statement)).rowcount:
                raise NotFound(f"No such dead delivery: {delivery_id[:128]}", param="delivery_id")


def _due_first(skipped: Collection[str], now: float) -> Select[Any]:
    """The endpoint whose delivery is due for longest. The query takes a single step in the index
    for each endpoint, because a slow endpoint may have a million deliveries that are due."""
    due_at = (
        select(func.min(DELIVERIES.c.due_at))
        .where(DELIVERIES.c.webhook_id == WEBHOOKS.c.id)
        .scalar_subquery()
    )
    return (
        select(WEBHOOKS.c.id)
        .where(WEBHOOKS.c.id.not_in(skipped), due_at <= now)
        .order_by(due_at)
        .limit(1)
    )


def _oldest_due(webhook_id: str, now: float) -> Select[Any]:
    """The delivery of an endpoint that is due for longest, unless another gateway claims it."""
    return (
        select(DELIVERIES.c.id)
        .where(DELIVERIES.c.webhook_id == webhook_id, DELIVERIES.c.due_at <= now)
        .order_by(DELIVERIES.c.due_at)
        .limit(1)
        .with_for_update(skip_locked=True)
    )


async def _webhook(
    connection: AsyncConnection, webhook_id: str, *, is_locked: bool = False
) -> Webhook:
    query = select(WEBHOOKS).where(WEBHOOKS.c.id == webhook_id)
    if is_locked:
        query = query.with_for_update()
    row = (await connection.execute(query)).one_or_none()
    if row is None:
        raise _no_webhook(webhook_id)
    return Webhook(**row._mapping)


async def _update(connection: AsyncConnection, webhook_id: str, **values: Any) -> Webhook:
    values["updated_at"] = int(time.time())
    await connection.execute(update(WEBHOOKS).where(WEBHOOKS.c.id == webhook_id).values(values))
    return await _webhook(connection, webhook_id)


async def _delivery(connection: AsyncConnection, row: Any) -> WebhookDelivery:
    return WebhookDelivery(
        id=row.id,
        event_id=row.event_id,
        type=row.type,
        object_id=row.object_id,
        created_at=row.created_at,
        num_tries=row.num_tries,
        reason=row.reason,
        webhook=await _webhook(connection, row.webhook_id),
    )


def _is_try(delivery: WebhookDelivery) -> Any:
    is_it = DELIVERIES.c.id == delivery.id
    return is_it & (DELIVERIES.c.num_tries == delivery.num_tries)


def _new_secret() -> str:
    return "whsec_" + base64.b64encode(secrets.token_bytes(_SECRET_BYTES)).decode()


def _no_webhook(webhook_id: str) -> NotFound:
    return NotFound(f"No such webhook: {webhook_id[:128]}", param="webhook_id")
