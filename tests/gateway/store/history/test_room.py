"""What a tenant stores at most, however fast it stores it."""

import pytest
from sqlalchemy import func, select

from gateway.store.database import Database
from gateway.store.history.conversations import Conversations, StoredItem
from gateway.store.history.responses import ResponseDraft, Responses
from gateway.store.history.room import StoreLimits, TenantRoom
from gateway.store.schema import CONVERSATION_ITEMS, RESPONSES
from shared.errors import InvalidRequest

MAX_BYTES = 100_000
LARGE = StoredItem("msg_1", b"x" * 20_000)
LIMITS = StoreLimits(retention_s=3600, max_objects=1000, max_bytes=MAX_BYTES)


@pytest.fixture
def room(database: Database) -> TenantRoom:
    return TenantRoom(database, LIMITS)


async def bytes_in(database: Database) -> int:
    """The size of all that is stored."""
    bodies = (func.length(RESPONSES.c.input), func.length(RESPONSES.c.body))
    sizes = (
        select(func.sum(func.length(CONVERSATION_ITEMS.c.body))),
        *(select(func.sum(size)) for size in bodies),
    )
    async with database.read() as connection:
        return sum([int((await connection.execute(size)).scalar() or 0) for size in sizes])


async def test_conversations_made_in_a_loop_never_exceed_the_limit(
    database: Database, room: TenantRoom
) -> None:
    conversations = Conversations(database, room)
    highest = 0

    for _ in range(20):
        newest = await conversations.create("a", {}, [LARGE])
        highest = max(highest, await bytes_in(database))

    assert MAX_BYTES // 2 < highest <= MAX_BYTES
    assert (await conversations.item("a", newest.id, LARGE.id)).body == LARGE.body


async def test_responses_and_what_they_add_to_conversations_never_exceed_the_limit(
    database: Database, room: TenantRoom
) -> None:
    responses, conversations = Responses(database, room), Conversations(database, room)
    highest = 0

    for number in range(10):
        conversation = await conversations.create("a", {}, [])
        draft = ResponseDraft(
            id=str(number),
            tenant="a",
            created_at=1,
            previous_id=None,
            conversation_id=conversation.id,
            conversation_end=None,
            input=b"[]",
            owner="gateway",
        )
        await responses.begin(draft)
        await responses.end("a", draft.id, LARGE.body, [LARGE])
        highest = max(highest, await bytes_in(database))

    assert MAX_BYTES // 2 < highest <= MAX_BYTES


async def test_what_other_gateways_store_counts_after_a_sweep(
    database: Database, room: TenantRoom
) -> None:
    here = Conversations(database, room)
    elsewhere = Conversations(database, TenantRoom(database, LIMITS))
    await here.create("a", {}, [LARGE])
    for _ in range(4):
        await elsewhere.create("a", {}, [LARGE])

    await room.sweep()
    await here.create("a", {}, [LARGE])

    assert await bytes_in(database) <= MAX_BYTES


async def test_what_was_deleted_leaves_room_and_other_tenants_keep_theirs(
    database: Database, room: TenantRoom
) -> None:
    conversations = Conversations(database, room)
    kept = await conversations.create("a", {}, [LARGE])
    theirs = await conversations.create("b", {}, [LARGE])

    for _ in range(20):
        brief = await conversations.create("a", {}, [LARGE])
        await conversations.delete("a", brief.id)

    await conversations.get("a", kept.id)
    await conversations.get("b", theirs.id)


async def test_a_conversation_that_alone_exceeds_the_limit_is_refused(
    database: Database, room: TenantRoom
) -> None:
    conversations = Conversations(database, room)
    with pytest.raises(InvalidRequest, match="at most 100000 bytes"):
        await conversations.create("a", {}, [LARGE] * 6)
    conversation = await conversations.create("a", {}, [LARGE] * 5)

    with pytest.raises(InvalidRequest, match="at most 100000 bytes"):
        await conversations.add("a", conversation.id, [LARGE])

    assert (await conversations.get("a", conversation.id)).num_bytes == MAX_BYTES
    assert await bytes_in(database) == MAX_BYTES
