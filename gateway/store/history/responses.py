"""Stored responses: their input, their result, and the chains that they form."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import and_, delete, func, insert, literal, select, tuple_, update
from sqlalchemy.exc import IntegrityError

from gateway.store.database import Database, uncancelled
from gateway.store.history.conversations import StoredItem, add_items, hold_nothing, items_of
from gateway.store.history.room import TenantRoom
from gateway.store.schema import RESPONSES
from gateway.store.webhooks import EventType, announce
from shared.errors import NotFound

MAX_CHAIN_LEN = 1000
"""Responses in a chain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseDraft:
    """A response that begins. ``created_at`` is a Unix time in seconds."""

    id: str
    tenant: str
    created_at: int
    previous_id: str | None
    conversation_id: str | None
    conversation_end: int | None
    """The position of the conversation's last item before it."""
    input: bytes
    """A JSON array of items."""
    owner: str
    """The name of the gateway that begins it."""
    is_background: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRecord(ResponseDraft):
    expires_at: int
    body: bytes | None
    """The response as JSON, once it has ended."""


class PendingResponse(NamedTuple):
    id: str
    created_at: int
    tenant: str
    owner: str
    is_background: bool


class EndedResponse(NamedTuple):
    id: str
    created_at: int


class Responses:
    """The stored responses of all tenants. Every method raises `Unavailable`."""

    def __init__(self, database: Database, room: TenantRoom) -> None:
        self._database = database
        self._room = room

    @uncancelled
    async def begin(self, draft: ResponseDraft, *, is_again: bool = False) -> bool:
        """Store a response that has not ended. Returns whether it is new: a request that is sent
        again with its Idempotency-Key is not. ``is_again``: it takes the place of a response that
        has ended."""
        values = {name: getattr(draft, name) for name in ResponseDraft.__slots__}
        values |= {
            "expires_at": self._room.expiry(),
            "is_pending": True,
            "num_bytes": len(draft.input),
        }
        try:
            async with self._database.begin() as connection:
                if is_again:
                    has_ended = and_(_is(draft.tenant, draft.id), ~RESPONSES.c.is_pending)
                    await connection.execute(delete(RESPONSES).where(has_ended))
                await connection.execute(insert(RESPONSES).values(values))
        except IntegrityError:
            return False
        await self._room.take(draft.tenant, len(draft.input), draft.id)
        return True

    @uncancelled
    async def end(
        self,
        tenant: str,
        response_id: str,
        body: bytes,
        output: Sequence[StoredItem],
        *,
        has_failed: bool = False,
        event: EventType | None = None,
    ) -> bool:
        """Store the result of a response, add its input and ``output`` to its conversation unless
        it has failed, and announce the event. Returns False if it has ended before, or was
        deleted."""
        is_it = and_(_is(tenant, response_id), RESPONSES.c.is_pending)
        num_bytes = len(body)
        statement = (
            update(RESPONSES)
            .where(is_it)
            .values(
                body=body, is_pending=False, num_bytes=func.length(RESPONSES.c.input) + len(body)
            )
        )
        query = select(RESPONSES.c.conversation_id, RESPONSES.c.input).where(
            RESPONSES.c.id == response_id
        )
        async with self._database.begin() as connection:
            if not (await connection.execute(statement)).rowcount:
                return False
            row = (await connection.execute(query)).one()
            if row.conversation_id is not None and not has_failed:
                items = [*items_of(row.input), *output]
                num_bytes += sum(len(item.body) for item in items)
                await add_items(connection, tenant, row.conversation_id, items, self._room.expiry())
            if event is not None:
                await announce(connection, tenant, event, response_id)
        await self._room.take(tenant, num_bytes, response_id)
        return True

    @uncancelled
    async def discard(
        self, tenant: str, response_id: str, *, event: EventType | None = None
    ) -> None:
        """Delete a response and announce the event, unless the response has ended."""
        is_it = and_(_is(tenant, response_id), RESPONSES.c.is_pending)
        async with self._database.begin() as connection:
            deleted = await connection.execute(delete(RESPONSES).where(is_it))
            if deleted.rowcount and event is not None:
                await announce(connection, tenant, event, response_id)

    @uncancelled
    async def find(self, tenant: str, response_id: str) -> ResponseRecord | None:
        query = select(*_COLUMNS).where(_is(tenant, response_id), _is_kept())
        async with self._database.read() as connection:
            row = (await connection.execute(query)).one_or_none()
        return None if row is None else _record(row)

    @uncancelled
    async def ended(self, tenant: str, *, after: str | None, limit: int) -> list[EndedResponse]:
        """At most ``limit`` responses that have ended, the newest first, from after the response
        with the id ``after``. Raises `NotFound`."""
        place = tuple_(RESPONSES.c.created_at, RESPONSES.c.id)
        query = (
            select(RESPONSES.c.id, RESPONSES.c.created_at)
            .where(RESPONSES.c.tenant == tenant, ~RESPONSES.c.is_pending, _is_kept())
            .order_by(RESPONSES.c.created_at.desc(), RESPONSES.c.id.desc())
            .limit(limit)
        )
        async with self._database.read() as connection:
            if after is not None:
                position = select(RESPONSES.c.created_at).where(_is(tenant, after), _is_kept())
                created_at = (await connection.execute(position)).scalar_one_or_none()
                if created_at is None:
                    raise not_found(after)
                query = query.where(place < tuple_(created_at, after))
            return [EndedResponse(*row) for row in await connection.execute(query)]

    @uncancelled
    async def delete(self, tenant: str, response_id: str) -> bool:
        """Returns whether there was such a response."""
        async with self._database.begin() as connection:
            statement = delete(RESPONSES).where(_is(tenant, response_id), _is_kept())
            return (await connection.execute(statement)).rowcount == 1

    @uncancelled
    async def chain(
        self,
        tenant: str,
        response_id: str,
        *,
        max_bytes: int,
        hold: Callable[[int], None] = hold_nothing,
    ) -> list[ResponseRecord] | None:
        """A response and all responses before it, the earliest first; None if they are more than
        `MAX_CHAIN_LEN` or have more than ``max_bytes``. Calls ``hold`` with their size before they
        are loaded.

        Raises `NotFound`, which names the response that is missing, and the errors of ``hold``.
        """
        start = select(
            RESPONSES.c.id,
            RESPONSES.c.previous_id,
            RESPONSES.c.num_bytes,
            literal(1).label("place"),
        ).where(_is(tenant, response_id), _is_kept())
        links = start.cte("links", recursive=True)
        links = links.union_all(
            select(
                RESPONSES.c.id,
                RESPONSES.c.previous_id,
                RESPONSES.c.num_bytes,
                links.c.place + 1,
            ).where(
                RESPONSES.c.id == links.c.previous_id,
                RESPONSES.c.tenant == tenant,
                _is_kept(),
                links.c.place <= MAX_CHAIN_LEN,
            )
        )
        in_order = select(links).order_by(links.c.place.desc())
        async with self._database.read() as connection:
            found = (await connection.execute(in_order)).all()
            num_bytes = sum(link.num_bytes for link in found)
            if len(found) > MAX_CHAIN_LEN or num_bytes > max_bytes:
                return None
            if not found or found[0].previous_id is not None:
                raise not_found(found[0].previous_id if found else response_id)
            hold(num_bytes)
            query = select(*_COLUMNS).where(RESPONSES.c.id.in_([link.id for link in found]))
            records = {row.id: _record(row) for row in await connection.execute(query)}
        gone = next((link.id for link in found if link.id not in records), None)
        if gone is not None:  # deleted between the two queries
            raise not_found(gone)
        return [records[link.id] for link in found]

    @uncancelled
    async def bodies(
        self,
        tenant: str,
        response_ids: Collection[str],
        *,
        max_bytes: int,
        hold: Callable[[int], None] = hold_nothing,
    ) -> list[bytes] | None:
        """The bodies of the responses that exist and have ended, in any order; None if they have
        more than ``max_bytes``. Calls ``hold`` with their size before they are loaded."""
        is_one = and_(
            RESPONSES.c.id.in_(response_ids), RESPONSES.c.tenant == tenant, ~RESPONSES.c.is_pending
        )
        size = select(func.sum(func.length(RESPONSES.c.body))).where(is_one, _is_kept())
        query = select(RESPONSES.c.body).where(is_one, _is_kept())
        async with self._database.read() as connection:
            num_bytes = (await connection.execute(size)).scalar_one() or 0
            if num_bytes > max_bytes:
                return None
            hold(num_bytes)
            return list((await connection.execute(query)).scalars())

    @uncancelled
    async def pending(
        self, limit: int, *, after: PendingResponse | None = None
    ) -> list[PendingResponse]:
        """At most ``limit`` responses that have not ended, the oldest first, from after ``after``,
        which may have ended."""
        query = (
            select(*(RESPONSES.c[name] for name in PendingResponse._fields))
            .where(RESPONSES.c.is_pending)
            .order_by(RESPONSES.c.created_at, RESPONSES.c.id)
            .limit(limit)
        )
        if after is not None:
            position = tuple_(RESPONSES.c.created_at, RESPONSES.c.id)
            query = query.where(position > tuple_(after.created_at, after.id))
        async with self._database.read() as connection:
            return [PendingResponse(*row) for row in await connection.execute(query)]


_COLUMNS = tuple(RESPONSES.c[name] for name in (*ResponseDraft.__slots__, "expires_at", "body"))


def not_found(response_id: str) -> NotFound:
    """The error for an id that no stored response of the tenant has."""
    return NotFound(f"Response with id '{response_id[:128]}' not found.", param="response_id")


def _is(tenant: str, response_id: str) -> Any:
    return and_(RESPONSES.c.id == response_id, RESPONSES.c.tenant == tenant)


def _is_kept() -> Any:
    return RESPONSES.c.expires_at > int(time.time())


def _record(row: Any) -> ResponseRecord:
    return ResponseRecord(**row._mapping)
