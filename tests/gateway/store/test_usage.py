"""The records of requests, and the sums over them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import delete, text
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.store import usage as store
from gateway.store.database import Database
from gateway.store.schema import USAGE
from gateway.store.usage import TotalUsage, UsageRecords, UsageSum
from shared.errors import InvalidRequest
from shared.messages import UsageRecord

NOON = 1_795_003_200.0
DAY_S = 24 * 3600.0


def a_record(request_id: str = "r", **fields: Any) -> UsageRecord:
    values: dict[str, Any] = {
        "tenant": "alice",
        "key_id": "k1",
        "model": "m",
        "job_class": "interactive",
        "outcome": "completed",
        "attempt": 1,
        "num_prompt_tokens": 10,
        "num_cached_tokens": 4,
        "num_output_tokens": 5,
        "queue_s": 0.5,
        "compute_s": 2.0,
        "ended_at": NOON,
    }
    return UsageRecord(request_id=request_id, **{**values, **fields})


async def all_sums(usage: UsageRecords, *groups: store.Group, **only: Any) -> list[UsageSum]:
    return await usage.sums(groups, **{"start": 0.0, "end": NOON + 10 * DAY_S, **only})


async def test_sums_leave_connections_to_others(
    usage: UsageRecords, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, open_at_once = database.read, [0]
    num_open = 0

    @asynccontextmanager
    async def counted() -> AsyncIterator[AsyncConnection]:
        nonlocal num_open
        async with read() as connection:
            num_open += 1
            open_at_once.append(num_open)
            yield connection
            num_open -= 1

    monkeypatch.setattr(database, "read", counted)

    await asyncio.gather(*(all_sums(usage, "model") for _ in range(10)))

    assert max(open_at_once) in {1, 2}


async def test_a_request_counts_once_however_often_it_is_recorded(usage: UsageRecords) -> None:
    num_new = await usage.write([a_record(), a_record(), a_record("other", outcome="cancelled")])
    num_new_again = await usage.write([a_record()])

    assert (num_new, num_new_again) == (2, 0)
    assert await all_sums(usage) == [
        UsageSum({}, TotalUsage(2, 1, 20, 8, 10, 0, 1.0, 4.0)),
    ]


async def test_numbers_that_a_publisher_has_chosen_fit(usage: UsageRecords) -> None:
    await usage.write([a_record(attempt=3_000_000_001, num_takeovers=3_000_000_000)])

    (found,) = await all_sums(usage)
    assert found.used.num_takeovers == 2**31 - 1


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(
    ("lesser", "counting"),
    [
        ({"attempt": 1, "ended_at": NOON + 1}, {"attempt": 2}),
        ({"attempt": 2}, {"attempt": 2, "ended_at": NOON + 1}),
        ({"attempt": 0, "ended_at": NOON + 1}, {"attempt": 1}),
        ({"attempt": 0, "ended_at": NOON + 1, "queue_s": 0.0, "compute_s": 0.0}, {"attempt": 1}),
    ],
    ids=[
        "of an earlier attempt",
        "of the same one but earlier",
        "of a log that was gone",
        "of a run that never began",
    ],
)
async def test_the_record_of_the_newest_attempt_counts(
    usage: UsageRecords, lesser: dict[str, Any], counting: dict[str, Any], is_late: bool
) -> None:
    records = [a_record(num_output_tokens=3, **lesser), a_record(num_output_tokens=7, **counting)]

    for record in reversed(records) if is_late else records:
        await usage.write([record])

    assert [found.used.num_output_tokens for found in await all_sums(usage)] == [7]


async def test_of_records_without_an_attempt_the_first_counts(usage: UsageRecords) -> None:
    await usage.write([a_record(attempt=0, num_output_tokens=7)])
    await usage.write([a_record(attempt=0, num_output_tokens=0, ended_at=NOON + 1)])

    assert [found.used.num_output_tokens for found in await all_sums(usage)] == [7]


@pytest.mark.parametrize("is_at_once", [False, True])
async def test_each_execution_of_a_request_counts(usage: UsageRecords, is_at_once: bool) -> None:
    first = a_record(attempt=2)
    second = a_record(attempt=1, num_output_tokens=7, ended_at=NOON + 60)
    takeover = a_record(attempt=2, num_output_tokens=9, queue_s=20.0, ended_at=NOON + 80)
    records = [second, first, takeover]

    if is_at_once:
        num_new = await usage.write(records)
    else:
        num_new = sum([await usage.write([record]) for record in (first, second, takeover)])
    num_new_again = await usage.write(records)

    assert (num_new, num_new_again) == (2, 0)
    (found,) = await all_sums(usage)
    assert (found.used.num_requests, found.used.num_output_tokens) == (2, 5 + 9)


@pytest.mark.parametrize("times", [{"compute_s": 60.0}, {"compute_s": 2.0, "run_s": 60.0}])
async def test_a_request_that_was_taken_over_counts_once(
    usage: UsageRecords, times: dict[str, Any]
) -> None:
    lost = a_record(attempt=1)
    takeover = a_record(attempt=2, num_output_tokens=9, ended_at=NOON + 50, **times)

    await usage.write([lost])
    num_new = await usage.write([takeover])

    assert num_new == 0
    assert [found.used.num_output_tokens for found in await all_sums(usage)] == [9]


async def test_tenants_may_use_the_same_request_ids(usage: UsageRecords) -> None:
    await usage.write([a_record(), a_record(tenant="bob", num_output_tokens=9)])

    of_all = await all_sums(usage, "tenant")
    of_bob = await all_sums(usage, tenants=["bob"])

    assert [(one.of["tenant"], one.used.num_output_tokens) for one in of_all] == [
        ("alice", 5),
        ("bob", 9),
    ]
    assert [one.used.num_output_tokens for one in of_bob] == [9]


async def test_sums_are_grouped_and_limited_in_time(usage: UsageRecords) -> None:
    await usage.write(
        [
            a_record("1"),
            a_record("2", key_id="k2"),
            a_record("3", model="n"),
            a_record("4", ended_at=NOON + DAY_S),
            a_record("5", ended_at=NOON + 3 * DAY_S),
        ]
    )

    found = await all_sums(usage, "key", "model", "day", end=NOON + 3 * DAY_S)

    assert [(*one.of.values(), one.used.num_requests) for one in found] == [
        ("k1", "m", "2026-11-18", 1),
        ("k1", "m", "2026-11-19", 1),
        ("k1", "n", "2026-11-18", 1),
        ("k2", "m", "2026-11-18", 1),
    ]


async def test_too_many_rows_are_refused(usage: UsageRecords) -> None:
    await usage.write([a_record(), a_record("2", model="n")])

    with pytest.raises(InvalidRequest, match="fewer groups"):
        await usage.sums(["model"], start=0, end=NOON + DAY_S, max_rows=1)


async def test_a_tenant_is_erased(usage: UsageRecords) -> None:
    await usage.write([a_record(), a_record("2"), a_record(tenant="bob")])

    num_erased = await usage.erase("alice")

    assert num_erased == 2
    assert [found.of["tenant"] for found in await all_sums(usage, "tenant")] == ["bob"]


async def test_old_records_are_swept(usage: UsageRecords) -> None:
    await usage.write([a_record(), a_record("2", ended_at=NOON + DAY_S)])

    num_swept = await usage.sweep(NOON + 1)

    assert num_swept == 1
    assert [found.used.num_requests for found in await all_sums(usage)] == [1]


async def test_any_number_of_records_is_erased(
    usage: UsageRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.store.database._MAX_DELETED", 2)
    await usage.write([a_record(str(number)) for number in range(5)])

    assert await usage.erase("alice") == 5
    assert await all_sums(usage) == []


@pytest.mark.parametrize("num_lost", [1, 2])
async def test_an_erasure_goes_on_after_records_that_another_gateway_deletes(
    database: Database, usage: UsageRecords, monkeypatch: pytest.MonkeyPatch, num_lost: int
) -> None:
    monkeypatch.setattr("gateway.store.database._MAX_DELETED", 2)
    await usage.write([a_record(str(number)) for number in range(5)])
    lost = [str(number) for number in range(num_lost)]

    async with database.begin() as connection:
        await connection.execute(delete(USAGE).where(USAGE.c.request_id.in_(lost)))
        erasing = asyncio.create_task(usage.erase("alice"))
        await waits_for_a_lock(database)

    assert await erasing == 5 - num_lost
    assert await all_sums(usage) == []


async def waits_for_a_lock(database: Database) -> None:
    """Returns once a transaction waits for another transaction; at once on SQLite, which has a
    queue."""
    waiting = text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
    while not database.is_sqlite:
        async with database.read() as connection:
            if (await connection.execute(waiting)).scalar_one():
                return
        await asyncio.sleep(0.01)
