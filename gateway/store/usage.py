"""The usage of requests: a record for each request, and the sums over the records."""

import asyncio
import operator
import secrets
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import msgspec
from sqlalchemy import Column, Executable, and_, case, func, not_, or_, select, tuple_, update
from sqlalchemy.dialects import postgresql, sqlite

from gateway.store.database import Database, uncancelled
from gateway.store.schema import USAGE
from shared.errors import InvalidRequest
from shared.messages import UsageRecord

Group: TypeAlias = Literal["tenant", "key", "model", "day"]
GROUPS: tuple[Group, ...] = get_args(Group)
MAX_ROWS = 10_000
_MAX_SUMS_AT_ONCE = 2
"""Sums over many records take seconds. They leave most of the database's connections to all that
holds up clients and leases."""
_PAGE_LEN = 1000
_MAX_COUNT = 2**31 - 1
"""The largest number that the database's 32-bit columns hold."""
_WRITE_LOCK = 0x55534147
"""Without this lock, two gateways that write two executions of a request would both take theirs for
the first."""
_KEY = ("tenant", "request_id")
_KEY_COLUMNS = tuple(USAGE.c[name] for name in _KEY)
_COLUMNS: Mapping[Group, Column[str]] = {
    "tenant": USAGE.c.tenant,
    "key": USAGE.c.key_id,
    "model": USAGE.c.model,
    "day": USAGE.c.day,
}


class TotalUsage(NamedTuple):
    """The usage of several requests together."""

    num_requests: int
    num_completed: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_takeovers: int
    queue_s: float
    compute_s: float
    num_cached_answers: int = 0
    """Requests whose answer was computed for another request."""
    num_cached_answer_prompt_tokens: int = 0
    """The part of ``num_prompt_tokens`` in these requests."""
    num_cached_answer_output_tokens: int = 0

    def plus(self, other: "TotalUsage") -> "TotalUsage":
        return TotalUsage._make(map(operator.add, self, other))


class UsageSum(NamedTuple):
    of: Mapping[Group, str]
    """The value of each group that was asked for, which the requests have in common."""
    used: TotalUsage


class UsageRecords:
    """The records of all tenants. Every method raises `Unavailable`."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._summing = asyncio.Semaphore(_MAX_SUMS_AT_ONCE)

    @uncancelled
    async def write(self, records: Sequence[UsageRecord]) -> int:
        """Write records; returns how many of them are of executions that had none before. Raises
        `InvalidRequest` for a time that no calendar has.

        A request whose Idempotency-Key is used again after its log has expired is executed again
        with the same id. Each of its executions counts.
        """
        keys = {(record.tenant, record.request_id) for record in records}
        known = select(*_KEY_COLUMNS).where(tuple_(*_KEY_COLUMNS).in_(keys))
        upsert = self._upsert()
        first: list[dict[str, Any]] = []
        repeated: list[UsageRecord] = []
        async with self._database.begin() as connection:
            await self._database.hold(connection, _WRITE_LOCK)
            seen = {(row.tenant, row.request_id) for row in await connection.execute(known)}
            for record in sorted(records, key=lambda record: record.ended_at):
                key = record.tenant, record.request_id
                if key in seen:
                    repeated.append(record)
                else:
                    seen.add(key)
                    first.append(_row(record))
            if first:
                await connection.execute(upsert, first)
            num_again = 0
            for record in repeated:
                num_again += (await connection.execute(_set_aside(record))).rowcount
                await connection.execute(upsert, _row(record))
        return len(first) + num_again

    async def sums(
        self,
        groups: Collection[Group],
        *,
        start: float,
        end: float,
        tenants: Collection[str] | None = None,
        max_rows: int = MAX_ROWS,
    ) -> list[UsageSum]:
        """The sums over the requests that ended from ``start`` until before ``end``, Unix times, in
        the order of their groups. ``tenants``: only requests of these tenants.

        Raises `InvalidRequest` if there are more than ``max_rows``.
        """
        ordered = [group for group in GROUPS if group in groups]
        columns = [_COLUMNS[group] for group in ordered]
        is_completed = case((USAGE.c.outcome == "completed", 1), else_=0)
        cached = [
            case((USAGE.c.is_cached, one), else_=0)
            for one in (1, USAGE.c.num_prompt_tokens, USAGE.c.num_output_tokens)
        ]
        summed = [
            func.coalesce(func.sum(column), 0)
            for column in (
                is_completed,
                USAGE.c.num_prompt_tokens,
                USAGE.c.num_cached_tokens,
                USAGE.c.num_output_tokens,
                USAGE.c.num_takeovers,
                USAGE.c.queue_s,
                USAGE.c.compute_s,
                *cached,
            )
        ]
        query = (
            select(*columns, func.count(), *summed)
            .where(USAGE.c.ended_at >= start, USAGE.c.ended_at < end)
            .group_by(*columns)
            .order_by(*columns)
            .limit(max_rows + 1)
        )
        if tenants is not None:
            query = query.where(USAGE.c.tenant.in_(tenants))
        async with self._summing:
            rows = await self._rows(query)
        require_few_rows(len(rows), max_rows)
        sums = [_sum(ordered, row) for row in rows]
        return [found for found in sums if found.used.num_requests]  # without groups there is a row

    async def request_ids(self, tenant: str, *, since: float) -> AsyncIterator[list[str]]:
        """The ids of a tenant's requests that ended at this time or later, in pages."""
        position = tuple_(USAGE.c.ended_at, USAGE.c.request_id)
        query = (
            select(USAGE.c.ended_at, USAGE.c.request_id)
            .where(USAGE.c.tenant == tenant, USAGE.c.ended_at >= since)
            .order_by(USAGE.c.ended_at, USAGE.c.request_id)
            .limit(_PAGE_LEN)
        )
        rows = await self._rows(query)
        while rows:
            yield [row.request_id for row in rows]
            last = rows[-1]
            rows = await self._rows(query.where(position > tuple_(last.ended_at, last.request_id)))

    @uncancelled
    async def _rows(self, query: Executable) -> list[Any]:
        async with self._database.read() as connection:
            return list(await connection.execute(query))

    async def erase(self, tenant: str) -> int:
        """Delete all records of a tenant; returns how many."""
        return await self._database.delete(USAGE, USAGE.c.tenant == tenant)

    async def sweep(self, before: float) -> int:
        """Delete the records of requests that ended before this time; returns how many."""
        return await self._database.delete(USAGE, USAGE.c.ended_at < before)

    def _upsert(self) -> Any:
        """Inserts a record, or replaces the record of the same execution if that counts less."""
        insert = sqlite.insert if self._database.is_sqlite else postgresql.insert
        statement = insert(USAGE)
        new = statement.excluded
        return statement.on_conflict_do_update(
            index_elements=_KEY,
            set_={name: new[name] for name in (*UsageRecord.__struct_fields__, "day")},
            where=and_(
                # Otherwise it is a late record of an execution that was set aside.
                not_(_is_before(new, USAGE.c)),
                or_(
                    new.attempt > USAGE.c.attempt,
                    and_(
                        new.attempt == USAGE.c.attempt,
                        new.attempt > 0,
                        new.ended_at > USAGE.c.ended_at,
                    ),
                ),
            ),
        )


def require_few_rows(num_rows: int, max_rows: int = MAX_ROWS) -> None:
    """Raises `InvalidRequest` if a report has more rows than that."""
    if num_rows > max_rows:
        raise InvalidRequest(
            f"More than {max_rows} rows: ask for a shorter time or fewer groups.", param="group_by"
        )


def _set_aside(record: UsageRecord) -> Any:
    """Gives the record of an earlier execution of the request an id of its own."""
    is_same = [column == getattr(record, column.name) for column in _KEY_COLUMNS]
    statement = update(USAGE).where(*is_same, _is_before(USAGE.c, record))
    return statement.values(request_id=f"earlier-{secrets.token_hex(16)}")


def _is_before(first: Any, second: Any) -> Any:
    """Whether an execution had ended when the job of another execution was created. A job that is
    delivered again was created before. ``queue_s`` is 0 if the time of creation is unknown."""
    created_at = second.ended_at - second.queue_s - _run_s(second)
    return and_(first.ended_at < created_at, second.queue_s > 0)


def _run_s(execution: Any) -> Any:
    """The time from the beginning of the engine to the end, of a record, a row or an insert."""
    if isinstance(execution, UsageRecord):
        return execution.compute_s if execution.run_s is None else execution.run_s
    return func.coalesce(execution.run_s, execution.compute_s)


def _row(record: UsageRecord) -> dict[str, Any]:
    try:
        day = datetime.fromtimestamp(record.ended_at, UTC).strftime("%Y-%m-%d")
    except (ValueError, OverflowError, OSError):
        raise InvalidRequest(f"ended_at: {record.ended_at} is not a date.") from None
    fields = msgspec.structs.asdict(record)
    # Both grow with a number that publishers choose.
    counts = {name: min(fields[name], _MAX_COUNT) for name in ("attempt", "num_takeovers")}
    return {**fields, **counts, "day": day}


def _sum(groups: Sequence[Group], row: Any) -> UsageSum:
    of = dict(zip(groups, row, strict=False))
    used = TotalUsage._make(row[len(groups) :])
    # PostgreSQL sums integers as decimals.
    counts = TotalUsage._make(map(int, used))
    return UsageSum(of, counts._replace(queue_s=used.queue_s, compute_s=used.compute_s))
