import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import pytest
from sqlalchemy import Engine, event, insert

from gateway.store import batches as store
from gateway.store.batches import Batches, BatchRecord, LeaseLost, LineAnswer, Order, TokensUsed
from gateway.store.database import Database
from gateway.store.files.records import Files
from gateway.store.schema import BATCHES
from shared.errors import IdempotencyMismatch, InvalidRequest, NotFound, Overloaded


async def ordered(
    files: Files, batches: Batches, tenant: str = "a", key: str | None = None, body: str = "b"
) -> BatchRecord:
    async with files.writing(tenant, "in.jsonl", "batch") as draft:
        pass
    order = Order("/v1/completions", draft.id, "24h", 86400, {"k": "v"}, None, key, key and body)
    return await batches.create(tenant, order)


async def claimed(batches: Batches, lease_s: float = 60) -> BatchRecord:
    batch = await batches.claim({}, lease_s)
    assert batch is not None
    return batch


async def started(files: Files, batches: Batches, num_lines: int = 3) -> BatchRecord:
    await ordered(files, batches)
    batch = await claimed(batches)
    await batches.start(batch.id, batch.fence, num_lines=num_lines, models=["m"])
    return await batches.get("a", batch.id)


@contextmanager
def deletions(table: str) -> Iterator[list[int]]:
    """How many rows each statement deletes from a table meanwhile."""
    nums: list[int] = []

    def record(_: object, cursor: Any, statement: str, *__: object) -> None:
        if statement.startswith(f"DELETE FROM {table} "):
            nums.append(cursor.rowcount)

    event.listen(Engine, "after_cursor_execute", record)
    try:
        yield nums
    finally:
        event.remove(Engine, "after_cursor_execute", record)


def answer(line: int, *, is_error: bool = False) -> LineAnswer:
    return LineAnswer(line, is_error, b"%d" % line)


async def test_a_new_batch_waits_for_its_check(files: Files, batches: Batches) -> None:
    batch = await ordered(files, batches)

    assert (batch.status, batch.metadata, batch.tenant) == ("validating", {"k": "v"}, "a")
    assert batch.expires_at == batch.created_at + 86400
    with pytest.raises(NotFound):
        await batches.get("b", batch.id)


async def test_a_file_of_another_tenant_cannot_be_ordered(files: Files, batches: Batches) -> None:
    batch = await ordered(files, batches)

    with pytest.raises(NotFound, match=batch.input_file_id):
        await batches.create("b", Order("/v1/completions", batch.input_file_id, "24h", 86400))


async def test_an_idempotency_key_makes_one_batch(files: Files, batches: Batches) -> None:
    async with files.writing("a", "in.jsonl", "batch") as draft:
        pass
    order = Order("/v1/completions", draft.id, "24h", 86400, None, None, "key", "body")

    made = await asyncio.gather(*(batches.create("a", order) for _ in range(4)))

    assert len({batch.id for batch in made}) == 1
    with pytest.raises(IdempotencyMismatch):
        await batches.create("a", order._replace(body_hash="other"))


async def test_pages_contain_each_batch_once(files: Files, batches: Batches) -> None:
    made = {(await ordered(files, batches)).id for _ in range(5)}

    seen: list[str] = []
    while page := await batches.page("a", after=seen[-1] if seen else None, limit=2):
        seen += [batch.id for batch in page]

    assert (set(seen), len(seen)) == (made, 5)
    assert await batches.page("b", after=None, limit=2) == []


async def test_a_batch_has_one_holder(files: Files, batches: Batches) -> None:
    await ordered(files, batches)

    claims = await asyncio.gather(*(batches.claim({}, 60) for _ in range(4)))

    assert sum(claim is not None for claim in claims) == 1


async def test_the_tenant_with_the_fewest_running_batches_comes_first(
    files: Files, batches: Batches
) -> None:
    await ordered(files, batches, "a")
    await ordered(files, batches, "b")

    claim = await batches.claim({"batch_1": "a"}, 60)

    assert claim is not None
    assert claim.tenant == "b"


async def test_many_batches_of_one_tenant_do_not_hide_those_of_another(
    database: Database, files: Files, batches: Batches
) -> None:
    batch = await ordered(files, batches, "a")
    row = {**asdict(batch), "created_at": 1, "idempotency_key": None}
    rows = [{**row, "id": f"batch_{number}"} for number in range(300)]
    async with database.begin() as connection:
        await connection.execute(insert(BATCHES), rows)
    await ordered(files, batches, "b")

    claims = [
        await batches.claim({"batch_of_a": "a"}, 60, is_full=is_full)
        for is_full in (True, True, False)
    ]

    assert [claim and claim.tenant for claim in claims] == ["b", None, "a"]


async def test_a_batch_whose_lease_ran_out_here_is_left_alone(
    files: Files, batches: Batches
) -> None:
    await ordered(files, batches)
    batch = await claimed(batches, lease_s=-1)

    again = await batches.claim({batch.id: batch.tenant}, 60)

    assert again is None
    assert await batches.renew(batch.id, batch.fence, 60) == "validating"


async def test_who_has_lost_its_lease_writes_nothing(files: Files, batches: Batches) -> None:
    await ordered(files, batches)
    old = await claimed(batches, lease_s=-1)
    new = await claimed(batches)
    await batches.start(new.id, new.fence, num_lines=1, models=["m"])

    for writing in (
        batches.record(old.id, old.fence, [answer(1)]),
        batches.renew(old.id, old.fence, 60),
        batches.fail(old.id, old.fence, []),
        batches.end(old.id, old.fence, "completed", output_file_id=None, error_file_id=None),
    ):
        with pytest.raises(LeaseLost):
            await writing

    assert (await batches.get("a", new.id)).status == "in_progress"
    assert await batches.answered(new.id, 1, 1) == set()


async def test_a_released_batch_is_free_at_once(files: Files, batches: Batches) -> None:
    await ordered(files, batches)
    old = await claimed(batches)

    await batches.renew(old.id, old.fence, 0)

    assert (await claimed(batches)).fence == old.fence + 1


async def test_a_line_is_answered_once(files: Files, batches: Batches) -> None:
    batch = await started(files, batches)

    await batches.record(batch.id, batch.fence, [answer(1), answer(2, is_error=True)])
    await batches.record(batch.id, batch.fence, [LineAnswer(1, True, b"again"), answer(3)])

    counted = await batches.get("a", batch.id)
    assert (counted.num_completed, counted.num_failed) == (2, 1)
    assert await batches.answered(batch.id, 2, 9) == {2, 3}
    assert await batches.answers(batch.id, is_error=False, after=0, limit=9, max_bytes=99) == [
        answer(1),
        answer(3),
    ]


async def test_what_an_answer_has_used_counts_once(files: Files, batches: Batches) -> None:
    batch = await started(files, batches)
    first = answer(1)._replace(used=TokensUsed(9, 4, 7, 2))
    second = answer(2)._replace(used=TokensUsed(1, 0, 2, 1))

    await batches.record(batch.id, batch.fence, [first])
    await batches.record(batch.id, batch.fence, [first, second, answer(3, is_error=True)])

    assert (await batches.get("a", batch.id)).used == TokensUsed(10, 4, 9, 3)


async def test_promoted_lines_count_once(files: Files, batches: Batches) -> None:
    batch = await started(files, batches)
    promoted = answer(1)._replace(is_promoted=True)

    await batches.record(batch.id, batch.fence, [promoted])
    await batches.record(batch.id, batch.fence, [promoted, answer(2)])

    assert (await batches.get("a", batch.id)).num_promoted == 1


async def test_answers_are_read_in_pages_of_limited_size(files: Files, batches: Batches) -> None:
    batch = await started(files, batches, num_lines=5)
    answers = [LineAnswer(line, False, bytes(size)) for line, size in enumerate((4, 4, 40, 1), 1)]
    await batches.record(batch.id, batch.fence, answers)

    pages, last = [], 0
    while page := await batches.answers(
        batch.id, is_error=False, after=last, limit=9, max_bytes=10
    ):
        pages.append([one.line for one in page])
        last = page[-1].line

    assert pages == [[1, 2], [3], [4]]


async def test_a_batch_ends_with_its_files(files: Files, batches: Batches) -> None:
    batch = await started(files, batches, num_lines=1)
    await batches.record(batch.id, batch.fence, [answer(1)])
    await batches.begin_to_end(batch.id, batch.fence)
    async with files.writing("a", "out.jsonl", "batch_output", is_hidden=True) as output:
        await output.write(b"1\n")
    with pytest.raises(NotFound):
        await files.get("a", output.id)

    await batches.end(
        batch.id, batch.fence, "completed", output_file_id=output.id, error_file_id=None
    )

    ended = await batches.get("a", batch.id)
    assert (ended.status, ended.output_file_id) == ("completed", output.id)
    assert ended.completed_at is not None
    assert (await files.get("a", output.id)).num_bytes == 2
    assert await batches.claim({}, 60) is None


async def test_the_answers_of_batches_that_have_ended_are_forgotten_in_pieces(
    files: Files, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_MAX_FORGOTTEN", 2)
    ended, running = [await started(files, batches, num_lines=5) for _ in range(2)]
    for batch in (ended, running):
        await batches.record(batch.id, batch.fence, [answer(line) for line in range(1, 6)])
    await batches.end(ended.id, ended.fence, "completed", output_file_id=None, error_file_id=None)
    at_the_end = await batches.answered(ended.id, 1, 5)

    with deletions("batch_answers") as nums_deleted:
        await batches.forget_answers()

    assert at_the_end == {1, 2, 3, 4, 5}
    assert nums_deleted == [2, 2, 1]
    assert await batches.answered(ended.id, 1, 5) == set()
    assert await batches.answered(running.id, 1, 5) == {1, 2, 3, 4, 5}


async def test_a_sweep_forgets_the_answers_that_a_gateway_has_left(
    files: Files, batches: Batches
) -> None:
    batch = await started(files, batches)
    await batches.record(batch.id, batch.fence, [answer(1)])
    await batches.end(batch.id, batch.fence, "completed", output_file_id=None, error_file_id=None)

    await batches.sweep(time.time() - 60)

    assert await batches.answered(batch.id, 1, 1) == set()
    assert (await batches.get("a", batch.id)).status == "completed"


async def test_batches_are_deleted_some_time_after_their_end(
    files: Files, batches: Batches
) -> None:
    ended = await started(files, batches)
    await batches.end(ended.id, ended.fence, "completed", output_file_id=None, error_file_id=None)
    await ordered(files, batches)
    failed = await claimed(batches)
    await batches.fail(failed.id, failed.fence, [])
    unended = await ordered(files, batches, "b")

    num_deleted = [await batches.sweep(time.time() + s) for s in (-60, 60)]

    assert num_deleted == [0, 2]
    assert [one.id for one in await batches.page("b", after=None, limit=9)] == [unended.id]
    for batch in (failed, ended):
        with pytest.raises(NotFound):
            await batches.get("a", batch.id)


async def test_the_batches_of_a_tenant_that_have_not_ended_are_limited(
    files: Files, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_UNENDED", 2)
    known = await ordered(files, batches, key="k")
    batch = await claimed(batches)
    await batches.fail(batch.id, batch.fence, [])
    for _ in range(2):
        await ordered(files, batches)

    with pytest.raises(Overloaded, match="at most 2 batches"):
        await ordered(files, batches)

    assert (await ordered(files, batches, key="k")).id == known.id
    assert (await ordered(files, batches, tenant="b")).tenant == "b"


async def test_a_cancelled_batch_is_not_started(files: Files, batches: Batches) -> None:
    await ordered(files, batches)
    batch = await claimed(batches)

    cancels = [await batches.cancel("a", batch.id) for _ in range(2)]
    await batches.start(batch.id, batch.fence, num_lines=1, models=["m"])

    assert [(found.status, is_new) for found, is_new in cancels] == [
        ("cancelling", True),
        ("cancelling", False),
    ]
    assert await batches.renew(batch.id, batch.fence, 60) == "cancelling"


async def test_another_tenant_cannot_cancel_a_batch(files: Files, batches: Batches) -> None:
    batch = await started(files, batches)

    with pytest.raises(NotFound, match=batch.id):
        await batches.cancel("b", batch.id)

    assert await batches.get("a", batch.id) == batch


async def test_a_batch_that_has_ended_cannot_be_cancelled(files: Files, batches: Batches) -> None:
    await ordered(files, batches)
    batch = await claimed(batches)
    await batches.fail(batch.id, batch.fence, [{"code": "x", "line": 1}])

    with pytest.raises(InvalidRequest, match="'failed'"):
        await batches.cancel("a", batch.id)
