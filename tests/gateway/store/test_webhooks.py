"""The endpoints of webhooks and their deliveries, on both databases."""

import asyncio
import time

import pytest

from gateway.store.batches import Batches, BatchRecord, LeaseLost, Order
from gateway.store.database import Database
from gateway.store.files.records import Files
from gateway.store.history.responses import ResponseDraft, Responses
from gateway.store.history.room import StoreLimits, TenantRoom
from gateway.store.webhooks import EVENT_TYPES, EventType, Webhook, WebhookDelivery, Webhooks
from shared.errors import NotFound
from tests.support.gateway.webhooks import fail_a_batch

TENANT, LEASE_S = "a", 60.0


@pytest.fixture
def webhooks(database: Database) -> Webhooks:
    return Webhooks(database)


async def added(
    webhooks: Webhooks, tenant: str = TENANT, event_types: tuple[EventType, ...] = EVENT_TYPES
) -> Webhook:
    return await webhooks.add(
        tenant=tenant, name="", url="https://example.com", event_types=event_types
    )


async def claimed_batch(files: Files, batches: Batches, tenant: str = TENANT) -> BatchRecord:
    async with files.writing(tenant, "in.jsonl", "batch") as draft:
        pass
    await batches.create(tenant, Order("/v1/completions", draft.id, "24h", 86400))
    batch = await batches.claim({}, LEASE_S)
    assert batch is not None
    return batch


async def due(webhooks: Webhooks) -> WebhookDelivery:
    delivery = await webhooks.claim([], LEASE_S)
    assert delivery is not None
    return delivery


async def test_the_end_of_a_batch_is_announced_once_to_each_endpoint_of_its_tenant(
    webhooks: Webhooks, files: Files, batches: Batches
) -> None:
    concerned = {(await added(webhooks)).id for _ in range(2)}
    await added(webhooks, tenant="b")
    await added(webhooks, event_types=("batch.failed",))
    batch = await claimed_batch(files, batches)

    async def end() -> None:
        await batches.end(batch.id, batch.fence, "expired", output_file_id=None, error_file_id=None)

    await end()
    with pytest.raises(LeaseLost):
        await end()

    made = [await due(webhooks), await due(webhooks)]
    assert await webhooks.claim([], LEASE_S) is None
    assert {delivery.webhook.id for delivery in made} == concerned
    assert {(one.type, one.object_id) for one in made} == {("batch.expired", batch.id)}
    assert len({one.event_id for one in made}) == 1


async def test_a_batch_that_was_cancelled_meanwhile_does_not_fail(
    webhooks: Webhooks, files: Files, batches: Batches
) -> None:
    await added(webhooks)
    batch = await claimed_batch(files, batches)
    await batches.cancel("a", batch.id)

    await batches.fail(batch.id, batch.fence, [])

    assert await webhooks.claim([], LEASE_S) is None


async def test_an_end_that_is_not_committed_announces_nothing(
    webhooks: Webhooks, files: Files, batches: Batches
) -> None:
    await added(webhooks)
    batch = await claimed_batch(files, batches)

    with pytest.raises(LeaseLost):
        await batches.fail(batch.id, batch.fence - 1, [])

    assert await webhooks.claim([], LEASE_S) is None


async def test_one_gateway_tries_a_delivery_at_a_time(
    webhooks: Webhooks, files: Files, batches: Batches
) -> None:
    await added(webhooks)
    await fail_a_batch(files, batches, TENANT)

    claims = await asyncio.gather(*(webhooks.claim([], LEASE_S) for _ in range(4)))

    assert sum(claim is not None for claim in claims) == 1


async def test_a_try_that_was_left_is_made_again_and_the_older_one_says_nothing(
    webhooks: Webhooks, files: Files, batches: Batches
) -> None:
    await added(webhooks)
    await fail_a_batch(files, batches, TENANT)

    left = await webhooks.claim([], lease_s=-1)
    again = await due(webhooks)
    assert left is not None
    await webhooks.delivered(left)
    await webhooks.failed(again, "status 500", time.time() - 1)

    third = await due(webhooks)
    assert (left.num_tries, again.num_tries, third.num_tries) == (1, 2, 3)
    assert (third.reason, third.event_id) == ("status 500", left.event_id)


async def test_busy_endpoints_are_left_out(
    webhooks: Webhooks, files: Files, batches: Batches
) -> None:
    busy, free = await added(webhooks), await added(webhooks)
    await fail_a_batch(files, batches, TENANT)

    delivery = await webhooks.claim([busy.id], LEASE_S)

    assert delivery is not None
    assert delivery.webhook.id == free.id
    assert await webhooks.claim([busy.id], LEASE_S) is None


async def test_a_delivery_that_is_done_is_forgotten(
    webhooks: Webhooks, files: Files, batches: Batches
) -> None:
    await added(webhooks)
    await fail_a_batch(files, batches, TENANT)

    await webhooks.delivered(await due(webhooks))

    assert await webhooks.claim([], LEASE_S) is None
    assert await webhooks.dead(10) == []


async def test_a_dead_delivery_is_listed_until_it_is_retried(
    webhooks: Webhooks, files: Files, batches: Batches
) -> None:
    await added(webhooks)
    batch = await fail_a_batch(files, batches, TENANT)
    delivery = await due(webhooks)

    await webhooks.failed(delivery, "x" * 1000, None)

    assert await webhooks.claim([], LEASE_S) is None
    (dead,) = await webhooks.dead(10)
    assert (dead.id, dead.object_id, dead.reason) == (delivery.id, batch.id, "x" * 256)
    await webhooks.retry(dead.id)
    assert await webhooks.dead(10) == []
    assert (await due(webhooks)).num_tries == 1
    with pytest.raises(NotFound):
        await webhooks.retry(dead.id)


async def test_an_endpoint_goes_with_its_deliveries(
    webhooks: Webhooks, files: Files, batches: Batches
) -> None:
    webhook = await added(webhooks)
    await fail_a_batch(files, batches, TENANT)

    await webhooks.remove(webhook.id)

    assert await webhooks.claim([], LEASE_S) is None
    assert await webhooks.all() == []
    with pytest.raises(NotFound):
        await webhooks.remove(webhook.id)


async def test_the_old_secret_is_active_for_a_while(webhooks: Webhooks) -> None:
    webhook = await added(webhooks)

    rotated = await webhooks.rotate(webhook.id, overlap_s=3600)

    now = time.time()
    assert rotated.active_secrets(now) == [rotated.secret, webhook.secret]
    assert rotated.active_secrets(now + 7200) == [rotated.secret]
    again = await webhooks.rotate(webhook.id, overlap_s=0)
    assert again.active_secrets(now) == [again.secret]
    assert len({webhook.secret, rotated.secret, again.secret}) == 3


async def test_a_tenants_endpoints_are_listed_and_changed(webhooks: Webhooks) -> None:
    first, _ = await added(webhooks), await added(webhooks, tenant="b")

    changed = await webhooks.change(first.id, url="https://example.org", name="new")

    assert (changed.url, changed.name, changed.secret) == (
        "https://example.org",
        "new",
        first.secret,
    )
    assert await webhooks.all("a") == [changed]
    assert len(await webhooks.all()) == 2
    with pytest.raises(NotFound):
        await webhooks.change("webhook_none", name="new")


async def test_a_secret_is_in_no_text_of_an_endpoint(webhooks: Webhooks) -> None:
    webhook = await webhooks.rotate((await added(webhooks)).id, overlap_s=60)

    assert "whsec_" not in repr(webhook)


async def test_the_end_of_a_background_response_is_announced_once(
    webhooks: Webhooks, database: Database
) -> None:
    responses = Responses(database, TenantRoom(database, StoreLimits(3600, 1000, 1 << 20)))
    await added(webhooks)
    for name in ("ends", "is lost"):
        draft = ResponseDraft(
            id=name,
            tenant=TENANT,
            created_at=1,
            previous_id=None,
            conversation_id=None,
            conversation_end=None,
            input=b"[]",
            owner="gateway",
            is_background=True,
        )
        await responses.begin(draft)
    pending = await responses.pending(9)

    for _ in range(2):
        await responses.end(TENANT, "ends", b"{}", [], event="response.incomplete")
        for name in ("ends", "is lost"):
            await responses.discard(TENANT, name, event="response.failed")

    made = [await due(webhooks), await due(webhooks)]
    assert all(response.is_background for response in pending)
    assert await webhooks.claim([], LEASE_S) is None
    assert {(one.type, one.object_id) for one in made} == {
        ("response.incomplete", "ends"),
        ("response.failed", "is lost"),
    }
