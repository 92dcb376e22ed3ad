"""Conversations: lists of items to which responses add their input and output."""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct
from sqlalchemy import and_, delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.store.database import Database, uncancelled
from gateway.store.history.room import TenantRoom
from gateway.store.schema import CONVERSATION_ITEMS, CONVERSATIONS
from shared.errors import InvalidRequest, NotFound

MAX_PAGE_BYTES = 16 << 20
"""The size of the items in a page."""


class StoredItem(NamedTuple):
    id: str
    body: bytes
    """The item as JSON."""


class _NamedItem(Struct):
    id: str


_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])
_NAMED = msgspec.json.Decoder(_NamedItem)


def hold_nothing(_: int) -> None:
    """Holds no memory: for items that are loaded while nothing counts them."""


def items_of(array: bytes | msgspec.Raw) -> list[StoredItem]:
    """The items in a JSON array."""
    return [StoredItem(_NAMED.decode(item).id, bytes(item)) for item in _ITEMS.decode(array)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationRecord:
    """A conversation without its items. Times are Unix times in seconds."""

    id: str
    tenant: str
    created_at: int
    expires_at: int
    metadata: Mapping[str, str]
    last_position: int
    """That of the last item that was ever added."""
    num_bytes: int
    """The size of its items."""


class Conversations:
    """The conversations of all tenants. Every method raises `Unavailable`."""

    def __init__(self, database: Database, room: TenantRoom) -> None:
        self._database = database
        self._room = room

    @uncancelled
    async def create(
        self, tenant: str, metadata: Mapping[str, str], items: Sequence[StoredItem]
    ) -> ConversationRecord:
        """Raises `InvalidRequest` if the items do not fit into the room of the tenant."""
        await self._room.space.require()
        now = int(time.time())
        conversation = ConversationRecord(
            id=f"conv_{secrets.token_hex(16)}",
            tenant=tenant,
            created_at=now,
            expires_at=self._room.expiry(),
            metadata=metadata,
            last_position=0,
            num_bytes=0,
        )
        values = {name: getattr(conversation, name) for name in CONVERSATIONS.columns.keys()}  # noqa: SIM118 (a collection of columns)
        async with self._database.begin() as connection:
            await connection.execute(insert(CONVERSATIONS).values(values))
            await self._add(connection, tenant, conversation.id, items)
        await self._room.take(tenant, _size(items), conversation.id)
        return conversation

    @uncancelled
    async def get(self, tenant: str, conversation_id: str) -> ConversationRecord:
        """Raises `NotFound`."""
        async with self._database.read() as connection:
            return await _get(connection, tenant, conversation_id)

    @uncancelled
    async def update(
        self, tenant: str, conversation_id: str, metadata: Mapping[str, str]
    ) -> ConversationRecord:
        """Replace the metadata. Raises `NotFound`."""
        values = {"metadata": metadata, "expires_at": self._room.expiry()}
        async with self._database.begin() as connection:
            await _get(connection, tenant, conversation_id)
            is_it = CONVERSATIONS.c.id == conversation_id
            await connection.execute(update(CONVERSATIONS).where(is_it).values(values))
            return await _get(connection, tenant, conversation_id)

    @uncancelled
    async def delete(self, tenant: str, conversation_id: str) -> None:
        """Delete a conversation with its items. Raises `NotFound`."""
        async with self._database.begin() as connection:
            await _get(connection, tenant, conversation_id)
            statement = delete(CONVERSATIONS).where(CONVERSATIONS.c.id == conversation_id)
            await connection.execute(statement)

    @uncancelled
    async def add(self, tenant: str, conversation_id: str, items: Sequence[StoredItem]) -> None:
        """Add items at the end. Raises `NotFound`, and `InvalidRequest` if the conversation does
        not fit into the room of the tenant with them."""
        await self._room.space.require()
        async with self._database.begin() as connection:
            if not await self._add(connection, tenant, conversation_id, items):
                raise _not_found(conversation_id)
        await self._room.take(tenant, _size(items), conversation_id)

    @uncancelled
    async def page(
        self,
        tenant: str,
        conversation_id: str,
        *,
        after: str | None,
        limit: int,
        newest_first: bool,
        max_bytes: int = MAX_PAGE_BYTES,
    ) -> tuple[list[StoredItem], bool]:
        """At most ``limit`` items, from after the item with the id ``after``, and whether there are
        more. The items have at most ``max_bytes`` together; a single item may have more. Raises
        `NotFound`."""
        position = CONVERSATION_ITEMS.c.position
        is_of_it = CONVERSATION_ITEMS.c.conversation_id == conversation_id
        order = position.desc() if newest_first else position
        size = func.length(CONVERSATION_ITEMS.c.body).label("num_bytes")
        query = select(position, size).where(is_of_it).order_by(order).limit(limit + 1)
        async with self._database.read() as connection:
            await _get(connection, tenant, conversation_id)
            if after is not None:
                # The page begins after the last item with this id, so that no page comes again.
                last = await _item(connection, conversation_id, after, newest=not newest_first)
                query = query.where(
                    position < last.position if newest_first else position > last.position
                )
            found = (await connection.execute(query)).all()
            totals = accumulate(row.num_bytes for row in found[:limit])
            num_items = max(1, sum(total <= max_bytes for total in totals))
            chosen = [row.position for row in found[:num_items]]
            page = select(CONVERSATION_ITEMS.c.id, CONVERSATION_ITEMS.c.body)
            page = page.where(is_of_it, position.in_(chosen)).order_by(order)
            items = [StoredItem(*row) for row in await connection.execute(page)]
        return items, len(found) > len(items)

    @uncancelled
    async def item(self, tenant: str, conversation_id: str, item_id: str) -> StoredItem:
        """Raises `NotFound`."""
        async with self._database.read() as connection:
            await _get(connection, tenant, conversation_id)
            row = await _item(connection, conversation_id, item_id)
            return StoredItem(row.id, row.body)

    @uncancelled
    async def delete_item(
        self, tenant: str, conversation_id: str, item_id: str
    ) -> ConversationRecord:
        """Returns the conversation. Raises `NotFound`."""
        async with self._database.begin() as connection:
            await _get(connection, tenant, conversation_id)
            row = await _item(connection, conversation_id, item_id)
            is_it = and_(
                CONVERSATION_ITEMS.c.conversation_id == conversation_id,
                CONVERSATION_ITEMS.c.position == row.position,
            )
            # Another request may have deleted it meanwhile.
            if (await connection.execute(delete(CONVERSATION_ITEMS).where(is_it))).rowcount:
                await connection.execute(
                    update(CONVERSATIONS)
                    .where(CONVERSATIONS.c.id == conversation_id)
                    .values(num_bytes=CONVERSATIONS.c.num_bytes - len(row.body))
                )
            return await _get(connection, tenant, conversation_id)

    @uncancelled
    async def history(
        self,
        tenant: str,
        conversation_id: str,
        end: int | None = None,
        *,
        max_bytes: int,
        hold: Callable[[int], None] = hold_nothing,
    ) -> tuple[list[StoredItem], int] | None:
        """The items up to the position ``end``, or all, and the position of the last item; None if
        they have more than ``max_bytes``. Calls ``hold`` with their size before they are loaded.
        Raises `NotFound`, and the errors of ``hold``."""
        async with self._database.read() as connection:
            conversation = await _get(connection, tenant, conversation_id)
            # On PostgreSQL, items may be added between the queries.
            last = conversation.last_position if end is None else end
            is_before = and_(
                CONVERSATION_ITEMS.c.conversation_id == conversation_id,
                CONVERSATION_ITEMS.c.position <= last,
            )
            size = select(func.sum(func.length(CONVERSATION_ITEMS.c.body))).where(is_before)
            num_bytes = int((await connection.execute(size)).scalar_one() or 0)
            if num_bytes > max_bytes:
                return None
            hold(num_bytes)
            query = select(CONVERSATION_ITEMS.c.id, CONVERSATION_ITEMS.c.body).where(is_before)
            query = query.order_by(CONVERSATION_ITEMS.c.position)
            items = [StoredItem(*row) for row in await connection.execute(query)]
        return items, conversation.last_position

    async def _add(
        self,
        connection: AsyncConnection,
        tenant: str,
        conversation_id: str,
        items: Sequence[StoredItem],
    ) -> bool:
        expires_at, max_bytes = self._room.expiry(), self._room.limits.max_bytes
        num_bytes = await add_items(connection, tenant, conversation_id, items, expires_at)
        if num_bytes is not None and num_bytes > max_bytes:
            message = f"A conversation has at most {max_bytes} bytes."
            raise InvalidRequest(message, param="items")
        return num_bytes is not None


async def add_items(
    connection: AsyncConnection,
    tenant: str,
    conversation_id: str,
    items: Sequence[StoredItem],
    expires_at: int,
) -> int | None:
    """Add items at the end of a conversation, in the transaction of the caller. Returns the size of
    all its items; None if there is no such conversation."""
    query = (
        select(CONVERSATIONS.c.last_position, CONVERSATIONS.c.num_bytes)
        .where(_visible(tenant), CONVERSATIONS.c.id == conversation_id)
        .with_for_update()
    )
    found = (await connection.execute(query)).one_or_none()
    if found is None:
        return None
    rows = [
        {"conversation_id": conversation_id, "position": position, "id": item.id, "body": item.body}
        for position, item in enumerate(items, found.last_position + 1)
    ]
    if rows:
        await connection.execute(insert(CONVERSATION_ITEMS), rows)
    await connection.execute(
        update(CONVERSATIONS)
        .where(CONVERSATIONS.c.id == conversation_id)
        .values(
            last_position=found.last_position + len(rows),
            num_bytes=CONVERSATIONS.c.num_bytes + _size(items),
            expires_at=expires_at,
        )
    )
    return int(found.num_bytes) + _size(items)


async def _get(
    connection: AsyncConnection, tenant: str, conversation_id: str
) -> ConversationRecord:
    query = select(CONVERSATIONS).where(CONVERSATIONS.c.id == conversation_id, _visible(tenant))
    row = (await connection.execute(query)).one_or_none()
    if row is None:
        raise _not_found(conversation_id)
    return ConversationRecord(**row._mapping)


async def _item(
    connection: AsyncConnection, conversation_id: str, item_id: str, *, newest: bool = True
) -> Any:
    """The newest or the oldest item with this id: an older gateway adds the items of responses that
    fail, and the items of their retries have the same ids. Raises `NotFound`."""
    position = CONVERSATION_ITEMS.c.position
    query = (
        select(CONVERSATION_ITEMS)
        .where(
            CONVERSATION_ITEMS.c.conversation_id == conversation_id,
            CONVERSATION_ITEMS.c.id == item_id,
        )
        .order_by(position.desc() if newest else position)
        .limit(1)
    )
    row = (await connection.execute(query)).one_or_none()
    if row is None:
        raise NotFound(
            f"Item with id '{item_id[:128]}' not found in this conversation.", param="item_id"
        )
    return row


def _not_found(conversation_id: str) -> NotFound:
    return NotFound(
        f"Conversation with id '{conversation_id[:128]}' not found.", param="conversation"
    )


def _size(items: Sequence[StoredItem]) -> int:
    return sum(len(item.body) for item in items)


def _visible(tenant: str) -> Any:
    return and_(CONVERSATIONS.c.tenant == tenant, CONVERSATIONS.c.expires_at > int(time.time()))
