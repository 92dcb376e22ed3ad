"""Batches: their states, the leases of the gateways that run them, and the answers to their lines.

    validating ──> in_progress ──> finalizing ──> completed
        │              │               └──────> expired (its window is over)
        ├──> failed    │
        └──────────────┴──> cancelling ─────────> cancelled

One gateway runs a batch at a time. It holds a lease, which it renews, and a fencing token, which
grows with each claim: a write under an older token is refused. Leases compare the clocks of
gateways, fencing tokens do not: with wrong clocks, work is repeated, but no answer is written
twice.
"""

import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from sqlalchemy import ColumnElement, and_, delete, func, insert, select, true, tuple_, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.store.database import Database, uncancelled
from gateway.store.files.records import lock_file, reveal
from gateway.store.schema import ANSWERS, BATCHES, UNENDED
from gateway.store.webhooks import EventType, announce
from shared.errors import IdempotencyMismatch, InvalidRequest, NotFound, Overloaded

BatchStatus: TypeAlias = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
BatchEnding: TypeAlias = Literal["completed", "expired", "cancelled"]

MAX_UNENDED = 1000
"""Batches of a tenant that have not ended."""
_PLACE_LOCK = 0x42415443
BATCH_PREFIX = "batch_"
"""The prefix of the ids of batches; no id of a request has it."""
_RETRY_AFTER_S = 60.0
_MAX_CANDIDATES = 4
"""Batches of each tenant that a claim tries. Other gateways may claim some of them at the same
time."""
_MAX_FORGOTTEN = 10_000
"""Answers that a single transaction deletes. A statement over millions of answers would exceed its
time."""
_EVENTS: Mapping[BatchEnding, EventType] = {
    "completed": "batch.completed",
    "expired": "batch.expired",
    "cancelled": "batch.cancelled",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """A batch. Times are Unix times in seconds."""

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: Mapping[str, str] | None
    output_expires_after_s: int | None
    status: BatchStatus
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    models: Sequence[str] | None
    """The models of its lines, once it is in progress."""
    errors: Sequence[Mapping[str, Any]] | None
    num_lines: int
    num_completed: int
    num_failed: int
    output_file_id: str | None
    error_file_id: str | None
    idempotency_key: str | None
    body_hash: str | None
    fence: int
    lease_until: float
    key_id: str
    """The API key of the order; empty without a key."""
    key_limits: Mapping[str, Any] | None
    """The limits of the key at the order: `gateway.intake.keys.api_key.ApiKey.limits`."""
    num_input_tokens: int | None
    """The input tokens of its answers so far; None if they were not counted, as in the next
    fields."""
    num_cached_tokens: int | None
    num_output_tokens: int | None
    num_reasoning_tokens: int | None
    num_promoted: int | None
    """Its answered lines that ran as interactive jobs; None if they were not counted."""

    @property
    def used(self) -> "TokensUsed | None":
        nums = [getattr(self, name) for name in TokensUsed._fields]
        return None if None in nums else TokensUsed(*nums)


class TokensUsed(NamedTuple):
    num_input_tokens: int = 0
    num_cached_tokens: int = 0
    """Tokens of the input that the prefix cache had."""
    num_output_tokens: int = 0
    num_reasoning_tokens: int = 0
    """Tokens of the output that are reasoning."""


class LineAnswer(NamedTuple):
    line: int
    """The number of the line in the input file, from 1."""
    is_error: bool
    text: bytes
    """The line of the output or error file, without its end."""
    used: TokensUsed = TokensUsed()
    """Only to be recorded, like the next field: answers that are read have none."""
    is_promoted: bool = False
    """Whether the line ran as an interactive job."""


class Order(NamedTuple):
    """The batch that a client orders: columns of the batch, and ``window_s``."""

    endpoint: str
    input_file_id: str
    completion_window: str
    window_s: int
    metadata: Mapping[str, str] | None = None
    output_expires_after_s: int | None = None
    idempotency_key: str | None = None
    body_hash: str | None = None
    key_id: str = ""
    key_limits: Mapping[str, Any] | None = None


class LeaseLost(Exception):
    """Another gateway has claimed the batch."""


class Batches:
    """The batches of all tenants. Every method raises `Unavailable`; methods that take a ``fence``
    raise `LeaseLost` if the batch was claimed since."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @uncancelled
    async def create(self, tenant: str, order: Order) -> BatchRecord:
        """Create a batch, or return the batch that the Idempotency-Key already has.

        Raises `NotFound` if there is no such file, `Overloaded` if the tenant has `MAX_UNENDED`,
        and `IdempotencyMismatch`.
        """
        now = int(time.time())
        ordered = order._asdict()
        values = {
            "id": f"{BATCH_PREFIX}{secrets.token_hex(16)}",
            "tenant": tenant,
            "status": "validating",
            "created_at": now,
            "expires_at": now + ordered.pop("window_s"),
            "num_lines": 0,
            "num_completed": 0,
            "num_failed": 0,
            "num_promoted": 0,
            "fence": 0,
            "lease_until": 0.0,
            **ordered,
            **TokensUsed()._asdict(),
        }
        if known := await self._of_key(tenant, order):
            return known
        try:
            async with self._database.begin() as connection:
                if not await lock_file(connection, tenant, order.input_file_id):
                    raise NotFound(
                        f"No such File object: {order.input_file_id[:128]}", param="input_file_id"
                    )
                await self._database.hold(connection, _PLACE_LOCK, tenant)
                await _require_place(connection, tenant)
                await connection.execute(insert(BATCHES).values(values))
        except IntegrityError:  # the same request was faster
            known = await self._of_key(tenant, order)
            if known is None:
                raise
            return known
        return await self.get(tenant, str(values["id"]))

    @uncancelled
    async def get(self, tenant: str | None, batch_id: str) -> BatchRecord:
        """The batch of a tenant, or of any tenant if ``tenant`` is None. Raises `NotFound`."""
        query = select(BATCHES).where(BATCHES.c.id == batch_id, _is_of(tenant))
        async with self._database.read() as connection:
            row = (await connection.execute(query)).one_or_none()
        if row is None:
            raise NotFound(f"No such Batch object: {batch_id[:128]}", param="batch_id")
        return _record(row)

    @uncancelled
    async def page(self, tenant: str | None, *, after: str | None, limit: int) -> list[BatchRecord]:
        """At most ``limit`` batches of a tenant, or of all tenants, newest first, from after the
        batch with the id ``after``. Raises `NotFound`."""
        position = tuple_(BATCHES.c.created_at, BATCHES.c.id)
        query = select(BATCHES).where(_is_of(tenant)).limit(limit)
        query = query.order_by(BATCHES.c.created_at.desc(), BATCHES.c.id.desc())
        if after is not None:
            last = await self.get(tenant, after)
            query = query.where(position < tuple_(last.created_at, last.id))
        async with self._database.read() as connection:
            return [_record(row) for row in await connection.execute(query)]

    @uncancelled
    async def cancel(self, tenant: str | None, batch_id: str) -> tuple[BatchRecord, bool]:
        """Begin to cancel a batch of a tenant, or of any tenant; returns it, and whether it has not
        been cancelled before. Raises `NotFound`, and `InvalidRequest` if it is too late."""
        is_it = and_(BATCHES.c.id == batch_id, _is_of(tenant))
        statement = (
            update(BATCHES)
            .where(is_it, BATCHES.c.status.in_(("validating", "in_progress")))
            .values(status="cancelling", cancelling_at=int(time.time()))
        )
        async with self._database.begin() as connection:
            is_new = bool((await connection.execute(statement)).rowcount)
        batch = await self.get(tenant, batch_id)
        if batch.status not in ("cancelling", "cancelled"):
            raise InvalidRequest(f"Cannot cancel a batch with status '{batch.status}'.")
        return batch, is_new

    @uncancelled
    async def cancel_all(self, *, tenant: str = "", key_id: str = "") -> int:
        """Begin to cancel all batches that were ordered with an API key, or else all batches of a
        tenant; returns their number."""
        is_meant = BATCHES.c.key_id == key_id if key_id else BATCHES.c.tenant == tenant
        is_running = and_(is_meant, BATCHES.c.status.in_(("validating", "in_progress")))
        values = {"status": "cancelling", "cancelling_at": int(time.time())}
        async with self._database.begin() as connection:
            cancelled = await connection.execute(update(BATCHES).where(is_running).values(values))
            return cancelled.rowcount

    @uncancelled
    async def unended(self, tenant: str) -> list[str]:
        """The ids of the batches of a tenant that have not ended, at most `MAX_UNENDED`."""
        is_unended = and_(BATCHES.c.tenant == tenant, BATCHES.c.status.in_(UNENDED))
        async with self._database.read() as connection:
            return list(
                (await connection.execute(select(BATCHES.c.id).where(is_unended))).scalars()
            )

    @uncancelled
    async def claim(
        self, running: Mapping[str, str], lease_s: float, *, is_full: bool = False
    ) -> BatchRecord | None:
        """Claim a batch that no gateway runs, if there is any: the oldest batch of the tenant that
        has the fewest batches in ``running``, the tenants of the batches that the caller runs, by
        id. ``is_full``: only a batch of a tenant that has no batch there."""
        is_free = and_(
            BATCHES.c.status.in_(UNENDED),
            BATCHES.c.lease_until < time.time(),
            # While the database was away, leases of the caller may have run out.
            BATCHES.c.id.not_in(list(running)),
        )
        num_running = Counter(running.values())
        if is_full:
            is_free = and_(is_free, BATCHES.c.tenant.not_in(list(num_running)))
        age = (BATCHES.c.created_at, BATCHES.c.id)
        place = func.row_number().over(partition_by=BATCHES.c.tenant, order_by=age)
        columns = (BATCHES.c.id, BATCHES.c.fence, BATCHES.c.tenant, BATCHES.c.created_at)
        ranked = select(*columns, place.label("place")).where(is_free).subquery()
        query = (
            select(ranked.c.id, ranked.c.fence, ranked.c.tenant)
            .where(ranked.c.place <= _MAX_CANDIDATES)
            .order_by(ranked.c.created_at, ranked.c.id)
        )
        async with self._database.begin() as connection:
            rows = (await connection.execute(query)).all()
            for row in sorted(rows, key=lambda row: num_running[row.tenant]):
                claim = (
                    update(BATCHES)
                    .where(BATCHES.c.id == row.id, BATCHES.c.fence == row.fence)
                    .values(fence=row.fence + 1, lease_until=time.time() + lease_s)
                )
                if (await connection.execute(claim)).rowcount:
                    found = select(BATCHES).where(BATCHES.c.id == row.id)
                    return _record((await connection.execute(found)).one())
        return None

    @uncancelled
    async def renew(self, batch_id: str, fence: int, lease_s: float) -> BatchStatus:
        """Renew a lease; returns the current status. With 0 seconds the batch is released."""
        statement = (
            update(BATCHES)
            .where(_held(batch_id, fence))
            .values(lease_until=time.time() + lease_s if lease_s else 0.0)
        )
        async with self._database.begin() as connection:
            if not (await connection.execute(statement)).rowcount:
                raise LeaseLost
            query = select(BATCHES.c.status).where(BATCHES.c.id == batch_id)
            status: BatchStatus = (await connection.execute(query)).scalar_one()
            return status

    @uncancelled
    async def start(
        self, batch_id: str, fence: int, *, num_lines: int, models: Sequence[str]
    ) -> None:
        """The file is valid: answer its lines, unless the batch was cancelled meanwhile."""
        await self._move(
            batch_id,
            fence,
            ("validating",),
            status="in_progress",
            in_progress_at=int(time.time()),
            num_lines=num_lines,
            models=list(models),
        )

    @uncancelled
    async def fail(self, batch_id: str, fence: int, errors: Sequence[Mapping[str, Any]]) -> None:
        """The file is not valid, unless the batch was cancelled meanwhile."""
        await self._move(
            batch_id,
            fence,
            ("validating",),
            event="batch.failed",
            status="failed",
            failed_at=int(time.time()),
            errors=list(errors),
        )

    @uncancelled
    async def begin_to_end(self, batch_id: str, fence: int) -> None:
        """Answer no further lines, unless the batch was cancelled meanwhile."""
        await self._move(
            batch_id,
            fence,
            ("validating", "in_progress"),
            status="finalizing",
            finalizing_at=int(time.time()),
        )

    @uncancelled
    async def end(
        self,
        batch_id: str,
        fence: int,
        ending: BatchEnding,
        *,
        output_file_id: str | None,
        error_file_id: str | None,
    ) -> None:
        """Publish the files of a batch. They contain its answers, which can be forgotten then."""
        file_ids = tuple(name for name in (output_file_id, error_file_id) if name is not None)
        async with self._database.begin() as connection:
            tenant = await _require_lease(connection, batch_id, fence)
            await reveal(connection, file_ids)
            await connection.execute(
                update(BATCHES)
                .where(BATCHES.c.id == batch_id)
                .values(
                    {
                        "status": ending,
                        f"{ending}_at": int(time.time()),
                        "output_file_id": output_file_id,
                        "error_file_id": error_file_id,
                    }
                )
            )
            await announce(connection, tenant, _EVENTS[ending], batch_id)

    async def forget_answers(self) -> None:
        """Delete the answers of batches that have ended."""
        while await self._forget_some():
            pass

    @uncancelled
    async def record(self, batch_id: str, fence: int, answers: Sequence[LineAnswer]) -> None:
        """Write answers to lines, and add up their usage; a line that has an answer keeps it."""
        async with self._database.begin() as connection:
            await _require_lease(connection, batch_id, fence)
            lines = [answer.line for answer in answers]
            query = select(ANSWERS.c.line).where(
                ANSWERS.c.batch_id == batch_id, ANSWERS.c.line.in_(lines)
            )
            # Written before by a commit whose confirmation was lost.
            known = set((await connection.execute(query)).scalars())
            new = [answer for answer in answers if answer.line not in known]
            if not new:
                return
            rows = [
                {"batch_id": batch_id, "line": one.line, "is_error": one.is_error, "text": one.text}
                for one in new
            ]
            await connection.execute(insert(ANSWERS), rows)
            num_failed = sum(answer.is_error for answer in new)
            used = TokensUsed(*map(sum, zip(*(answer.used for answer in new), strict=True)))
            await connection.execute(
                update(BATCHES)
                .where(BATCHES.c.id == batch_id)
                .values(
                    num_completed=BATCHES.c.num_completed + len(new) - num_failed,
                    num_failed=BATCHES.c.num_failed + num_failed,
                    num_promoted=BATCHES.c.num_promoted + sum(one.is_promoted for one in new),
                    **{name: BATCHES.c[name] + num for name, num in used._asdict().items()},
                )
            )

    @uncancelled
    async def answered(self, batch_id: str, first: int, last: int) -> set[int]:
        """The lines from ``first`` to ``last`` that have an answer."""
        query = select(ANSWERS.c.line).where(
            ANSWERS.c.batch_id == batch_id, ANSWERS.c.line.between(first, last)
        )
        async with self._database.read() as connection:
            return set((await connection.execute(query)).scalars())

    @uncancelled
    async def answered_bytes(self, batch_id: str) -> int:
        """The size of all answers."""
        size = select(func.sum(func.length(ANSWERS.c.text))).where(ANSWERS.c.batch_id == batch_id)
        async with self._database.read() as connection:
            return int((await connection.execute(size)).scalar() or 0)

    @uncancelled
    async def answers(
        self, batch_id: str, *, is_error: bool, after: int, limit: int, max_bytes: int
    ) -> list[LineAnswer]:
        """At most ``limit`` answers in the order of the input, from after the line ``after``, with
        at most ``max_bytes`` together; a single answer may have more."""
        is_next = and_(
            ANSWERS.c.batch_id == batch_id,
            ANSWERS.c.is_error.is_(is_error),
            ANSWERS.c.line > after,
        )
        in_order = select(ANSWERS.c.line, func.length(ANSWERS.c.text)).where(is_next)
        sizes = in_order.order_by(ANSWERS.c.line).limit(limit)
        async with self._database.read() as connection:
            last, num_bytes = after, 0
            for line, size in await connection.execute(sizes):
                num_bytes += size
                if num_bytes > max_bytes and last > after:
                    break
                last = line
            query = select(ANSWERS.c.line, ANSWERS.c.is_error, ANSWERS.c.text)
            page = query.where(is_next, ANSWERS.c.line <= last).order_by(ANSWERS.c.line)
            return [LineAnswer(*row) for row in await connection.execute(page)]

    async def sweep(self, before: float) -> int:
        """Delete the answers of batches that have ended, and the batches that ended before this
        time; returns how many batches."""
        await self.forget_answers()
        endings = (BATCHES.c[f"{ending}_at"] for ending in (*_EVENTS, "failed"))
        has_ended = and_(BATCHES.c.status.not_in(UNENDED), func.coalesce(*endings) < before)
        return await self._database.delete(BATCHES, has_ended)

    @uncancelled
    async def _forget_some(self) -> bool:
        """Whether there was an answer of a batch that has ended."""
        of_batch = select(func.min(ANSWERS.c.line)).where(ANSWERS.c.batch_id == BATCHES.c.id)
        first = of_batch.scalar_subquery()
        ended = select(BATCHES.c.id, first).where(BATCHES.c.status.not_in(UNENDED))
        async with self._database.read() as connection:
            row = (await connection.execute(ended.where(first.is_not(None)).limit(1))).one_or_none()
        if row is None:
            return False
        batch_id, line = row
        is_forgotten = and_(ANSWERS.c.batch_id == batch_id, ANSWERS.c.line < line + _MAX_FORGOTTEN)
        async with self._database.begin() as connection:
            await connection.execute(delete(ANSWERS).where(is_forgotten))
        return True

    @uncancelled
    async def _of_key(self, tenant: str, order: Order) -> BatchRecord | None:
        if order.idempotency_key is None:
            return None
        query = select(BATCHES).where(
            BATCHES.c.tenant == tenant, BATCHES.c.idempotency_key == order.idempotency_key
        )
        async with self._database.read() as connection:
            row = (await connection.execute(query)).one_or_none()
        if row is None:
            return None
        if row.body_hash != order.body_hash:
            raise IdempotencyMismatch("This Idempotency-Key was used with another body.")
        return _record(row)

    @uncancelled
    async def _move(
        self,
        batch_id: str,
        fence: int,
        statuses: Sequence[BatchStatus],
        *,
        event: EventType | None = None,
        **values: Any,
    ) -> None:
        """Change a batch and announce the event, if the batch has any of these statuses."""
        async with self._database.begin() as connection:
            tenant = await _require_lease(connection, batch_id, fence)
            is_due = and_(BATCHES.c.id == batch_id, BATCHES.c.status.in_(statuses))
            moved = await connection.execute(update(BATCHES).where(is_due).values(values))
            if moved.rowcount and event is not None:
                await announce(connection, tenant, event, batch_id)


def _is_of(tenant: str | None) -> ColumnElement[bool]:
    return true() if tenant is None else BATCHES.c.tenant == tenant


async def _require_place(connection: AsyncConnection, tenant: str) -> None:
    """Raises `Overloaded`."""
    is_unended = and_(BATCHES.c.tenant == tenant, BATCHES.c.status.in_(UNENDED))
    query = select(func.count()).select_from(BATCHES).where(is_unended)
    if (await connection.execute(query)).scalar_one() >= MAX_UNENDED:
        raise Overloaded(
            f"A tenant has at most {MAX_UNENDED} batches that have not ended.",
            retry_after_s=_RETRY_AFTER_S,
        )


async def _require_lease(connection: AsyncConnection, batch_id: str, fence: int) -> str:
    """Hold the batch until the end of the transaction; returns its tenant. Raises `LeaseLost`."""
    query = select(BATCHES.c.tenant).where(_held(batch_id, fence)).with_for_update()
    tenant: str | None = (await connection.execute(query)).scalar_one_or_none()
    if tenant is None:
        raise LeaseLost
    return tenant


def _held(batch_id: str, fence: int) -> Any:
    return and_(BATCHES.c.id == batch_id, BATCHES.c.fence == fence, BATCHES.c.status.in_(UNENDED))


def _record(row: Any) -> BatchRecord:
    return BatchRecord(**row._mapping)
