import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from sqlalchemy import insert, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.store.database import Database
from gateway.store.history.conversations import Conversations, StoredItem, add_items
from gateway.store.history.responses import MAX_CHAIN_LEN, ResponseDraft, Responses
from gateway.store.history.room import StoreLimits, TenantRoom
from gateway.store.schema import CONVERSATIONS, RESPONSES
from shared.errors import NotFound, Overloaded

DAY_S = 24 * 3600
LIMITS = StoreLimits(retention_s=DAY_S, max_objects=1000, max_bytes=1 << 20)
ITEM = StoredItem("msg_1", b'{"id":"msg_1"}')
INPUT = b'[{"id":"msg_in"}]'
OUTPUT = StoredItem("msg_out", b'{"id":"msg_out"}')
NO_LIMIT = 1 << 30


@pytest.fixture
def responses(database: Database) -> Responses:
    return Responses(database, TenantRoom(database, LIMITS))


@pytest.fixture
def conversations(database: Database) -> Conversations:
    return Conversations(database, TenantRoom(database, LIMITS))


def draft(
    name: str,
    previous: str | None = None,
    *,
    tenant: str = "a",
    conversation_id: str | None = None,
) -> ResponseDraft:
    return ResponseDraft(
        id=name,
        tenant=tenant,
        created_at=1,
        previous_id=previous,
        conversation_id=conversation_id,
        conversation_end=None,
        input=INPUT,
        owner="gateway",
    )


async def store(
    responses: Responses, name: str, previous: str | None = None, body: bytes = b"{}"
) -> None:
    await responses.begin(draft(name, previous))
    await responses.end("a", name, body, [OUTPUT])


async def test_a_response_begins_and_ends_once(responses: Responses) -> None:
    begun = [await responses.begin(draft("one")) for _ in range(2)]
    pending = await responses.pending(9)
    ended = [await responses.end("a", "one", body, [OUTPUT]) for body in (b"first", b"second")]
    await responses.discard("a", "one")

    record = await responses.find("a", "one")
    assert (begun, ended) == ([True, False], [True, False])
    assert [one.id for one in pending] == ["one"]
    assert record is not None
    assert (record.body, record.input) == (b"first", INPUT)
    assert await responses.pending(9) == []


async def test_what_does_not_end_is_discarded(responses: Responses) -> None:
    await responses.begin(draft("one"))

    await responses.discard("a", "one")

    assert await responses.find("a", "one") is None
    assert not await responses.end("a", "one", b"{}", [OUTPUT])


async def test_ended_responses_are_listed_in_pages_and_the_newest_first(
    responses: Responses,
) -> None:
    for second, name in enumerate(("one", "two", "three"), start=1):
        await responses.begin(replace(draft(name), created_at=second))
        await responses.end("a", name, b"{}", [OUTPUT])
    await responses.begin(draft("pending"))
    await responses.begin(draft("foreign", tenant="b"))
    await responses.end("b", "foreign", b"{}", [OUTPUT])

    first = await responses.ended("a", after=None, limit=2)
    rest = await responses.ended("a", after="two", limit=2)

    assert [tuple(one) for one in [*first, *rest]] == [("three", 3), ("two", 2), ("one", 1)]
    with pytest.raises(NotFound, match="'foreign'"):
        await responses.ended("a", after="foreign", limit=2)


async def test_the_sizes_of_responses_are_read_without_their_bodies(tmp_path: Path) -> None:
    database = await Database.open(None, tmp_path)
    query = "SELECT tenant, sum(num_bytes) FROM responses GROUP BY tenant"

    async with database.read() as connection:
        plan = (await connection.execute(text(f"EXPLAIN QUERY PLAN {query}"))).all()

    assert "COVERING INDEX responses_of_tenant" in str(plan)
    await database.close()


async def test_a_chain_begins_with_the_first_response(responses: Responses) -> None:
    await store(responses, "one")
    await store(responses, "two", "one")
    await store(responses, "three", "two")

    chain = await responses.chain("a", "three", max_bytes=NO_LIMIT)

    assert chain is not None
    assert [record.id for record in chain] == ["one", "two", "three"]


def refuse(num_bytes: int) -> None:
    raise Overloaded(f"{num_bytes} bytes are too many.", limit="test")


async def test_a_chain_is_counted_before_it_is_loaded(responses: Responses) -> None:
    await store(responses, "one")
    await store(responses, "two", "one", body=b"x" * 100)
    num_bytes = 2 * len(INPUT) + len(b"{}") + 100

    with pytest.raises(Overloaded, match=f"^{num_bytes} bytes"):
        await responses.chain("a", "two", max_bytes=NO_LIMIT, hold=refuse)


async def test_a_history_is_counted_before_it_is_loaded(conversations: Conversations) -> None:
    conversation = await conversations.create("a", {}, [ITEM, OUTPUT])
    num_bytes = len(ITEM.body) + len(OUTPUT.body)

    with pytest.raises(Overloaded, match=f"^{num_bytes} bytes"):
        await conversations.history("a", conversation.id, max_bytes=NO_LIMIT, hold=refuse)


async def test_a_chain_without_a_link_names_it(responses: Responses) -> None:
    await store(responses, "one")
    await store(responses, "two", "one")
    await responses.delete("a", "one")

    for tenant, name, missing in (("a", "two", "one"), ("a", "none", "none"), ("b", "two", "two")):
        with pytest.raises(NotFound, match=f"'{missing}'"):
            await responses.chain(tenant, name, max_bytes=NO_LIMIT)


async def test_a_chain_is_bounded(database: Database, responses: Responses) -> None:
    await store(responses, "0", body=b"x" * 100)
    kept = {"is_pending": True, "num_bytes": 0, "expires_at": 1 << 40}
    drafts = (draft(str(number + 1), str(number)) for number in range(MAX_CHAIN_LEN))
    async with database.begin() as connection:
        await connection.execute(insert(RESPONSES), [{**asdict(one), **kept} for one in drafts])

    longest = await responses.chain("a", str(MAX_CHAIN_LEN - 1), max_bytes=NO_LIMIT)

    assert longest is not None
    assert len(longest) == MAX_CHAIN_LEN
    assert await responses.chain("a", str(MAX_CHAIN_LEN), max_bytes=NO_LIMIT) is None
    assert await responses.chain("a", "0", max_bytes=100) is None


async def test_what_expires_is_invisible_and_then_deleted(database: Database) -> None:
    room = TenantRoom(database, LIMITS._replace(retention_s=0))
    short, conversations = Responses(database, room), Conversations(database, room)
    await store(short, "one")
    conversation = await conversations.create("a", {}, [ITEM])

    assert await short.find("a", "one") is None
    assert not await short.delete("a", "one")
    with pytest.raises(NotFound):
        await conversations.get("a", conversation.id)
    await room.sweep()
    assert await short.begin(draft("one"))


class CountingDatabase(Database):
    num_written = 0
    """Transactions."""

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[AsyncConnection]:
        self.num_written += 1
        async with super().begin() as connection:
            yield connection


@pytest.mark.parametrize("limits", [{"retention_s": 0}, {"max_objects": 0}])
async def test_a_sweep_is_made_of_small_transactions(
    database_url: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limits: dict[str, int],
) -> None:
    monkeypatch.setattr("gateway.store.database._MAX_DELETED", 2)
    database = await CountingDatabase.open(database_url, tmp_path)
    room = TenantRoom(database, LIMITS._replace(**limits))
    responses, conversations = Responses(database, room), Conversations(database, room)
    for name in ("one", "two", "three"):
        await store(responses, name)
        await conversations.create("a", {}, [ITEM])

    before = database.num_written
    await room.sweep()

    assert database.num_written - before >= 4
    async with database.read() as connection:
        for table in (RESPONSES, CONVERSATIONS):
            assert (await connection.execute(select(table))).all() == []
    await database.close()


async def test_what_a_tenant_has_too_much_goes_the_oldest_first(database: Database) -> None:
    room = TenantRoom(database, LIMITS._replace(max_objects=2))
    by_number = Responses(database, room)
    for age, name in enumerate(["old", "newer", "newest"]):
        kept = TenantRoom(database, LIMITS._replace(retention_s=(age + 1) * DAY_S))
        await store(Responses(database, kept), name)
    await by_number.begin(draft("another's", tenant="b"))

    await room.sweep()
    left = [await by_number.find("a", name) for name in ("old", "newer", "newest")]
    await TenantRoom(database, LIMITS._replace(max_bytes=len(INPUT) + len(b"{}"))).sweep()

    assert [record is None for record in left] == [True, False, False]
    assert await by_number.find("a", "newer") is None
    assert await by_number.find("a", "newest") is not None
    assert await by_number.find("b", "another's") is not None


async def test_a_conversation_receives_what_a_response_was_asked_and_answered(
    responses: Responses, conversations: Conversations
) -> None:
    conversation = await conversations.create("a", {}, [ITEM])
    await responses.begin(draft("one", conversation_id=conversation.id))

    before = await conversations.history("a", conversation.id, max_bytes=NO_LIMIT)
    await responses.end("a", "one", b"{}", [OUTPUT])
    after = await conversations.history("a", conversation.id, max_bytes=NO_LIMIT)
    up_to_then = await conversations.history("a", conversation.id, 1, max_bytes=NO_LIMIT)

    assert (before, up_to_then) == (([ITEM], 1), ([ITEM], 3))
    assert after == ([ITEM, StoredItem("msg_in", b'{"id":"msg_in"}'), OUTPUT], 3)
    assert await conversations.history("a", conversation.id, max_bytes=10) is None
    changed = await conversations.get("a", conversation.id)
    assert changed.num_bytes == sum(len(item.body) for item in after[0])


async def test_a_history_ends_with_the_last_position_that_it_states(
    database: Database, conversations: Conversations
) -> None:
    conversation = await conversations.create("a", {}, [ITEM])
    async with database.begin() as connection:
        if not database.is_sqlite:  # the items are read once they have been added to
            await connection.execute(text("LOCK TABLE conversation_items"))
        history = conversations.history("a", conversation.id, max_bytes=NO_LIMIT)
        reading = asyncio.create_task(history)
        while not database.is_sqlite:
            query = "SELECT count(*) FROM pg_locks WHERE NOT granted"
            if (await connection.execute(text(query))).scalar_one():
                break
        await add_items(connection, "a", conversation.id, [OUTPUT], 1 << 40)

    found = await reading
    assert found is not None
    items, last_position = found
    assert len(items) == last_position


async def test_a_conversation_receives_nothing_of_a_response_that_fails(
    responses: Responses, conversations: Conversations
) -> None:
    conversation = await conversations.create("a", {}, [ITEM])
    again = draft("one", conversation_id=conversation.id)
    await responses.begin(again)

    await responses.end("a", "one", b"{}", [OUTPUT], has_failed=True)
    after_failure = await conversations.history("a", conversation.id, max_bytes=NO_LIMIT)
    await responses.begin(again, is_again=True)
    await responses.end("a", "one", b"{}", [OUTPUT])

    assert after_failure == ([ITEM], 1)
    history = await conversations.history("a", conversation.id, max_bytes=NO_LIMIT)
    assert history == ([ITEM, StoredItem("msg_in", b'{"id":"msg_in"}'), OUTPUT], 3)


@pytest.mark.parametrize("newest_first", [False, True])
async def test_pages_end_where_items_share_an_id(
    conversations: Conversations, newest_first: bool
) -> None:
    twice = [StoredItem("msg_twice", body) for body in (b"1", b"2")]
    conversation = await conversations.create("a", {}, twice)

    async def page(after: str | None) -> tuple[list[StoredItem], bool]:
        return await conversations.page(
            "a", conversation.id, after=after, limit=1, newest_first=newest_first
        )

    assert await page(None) == ([twice[1 if newest_first else 0]], True)
    assert await page("msg_twice") == ([], False)
    assert await conversations.item("a", conversation.id, "msg_twice") == twice[1]


async def test_a_response_outlives_its_conversation(
    responses: Responses, conversations: Conversations
) -> None:
    conversation = await conversations.create("a", {}, [])
    await responses.begin(draft("one", conversation_id=conversation.id))
    await conversations.delete("a", conversation.id)

    assert await responses.end("a", "one", b"{}", [OUTPUT])
    assert await responses.find("a", "one") is not None


async def test_a_page_of_items_is_limited_in_bytes(conversations: Conversations) -> None:
    items = [StoredItem(f"msg_{number}", b"x" * 10) for number in range(5)]
    conversation = await conversations.create("a", {}, items)

    async def page(after: str | None, limit: int, max_bytes: int) -> tuple[list[StoredItem], bool]:
        return await conversations.page(
            "a", conversation.id, after=after, limit=limit, newest_first=False, max_bytes=max_bytes
        )

    assert await page(None, 9, 29) == (items[:2], True)
    assert await page("msg_1", 9, 5) == (items[2:3], True)
    assert await page("msg_2", 1, 99) == (items[3:4], True)
    assert await page("msg_2", 9, 20) == (items[3:], False)
    assert await page("msg_4", 9, 20) == ([], False)


async def test_responses_that_have_not_ended_come_in_pages(responses: Responses) -> None:
    for name in ("b", "a", "c"):
        await responses.begin(draft(name))

    first = await responses.pending(2)
    rest = await responses.pending(2, after=first[-1])

    assert [[one.id for one in page] for page in (first, rest)] == [["a", "b"], ["c"]]


async def test_the_place_of_a_deleted_item_is_not_used_again(
    conversations: Conversations,
) -> None:
    conversation = await conversations.create("a", {}, [ITEM])

    await conversations.delete_item("a", conversation.id, ITEM.id)
    await conversations.add("a", conversation.id, [OUTPUT])

    history = await conversations.history("a", conversation.id, max_bytes=NO_LIMIT)
    assert history == ([OUTPUT], 2)
    with pytest.raises(NotFound):
        await conversations.item("a", conversation.id, ITEM.id)
