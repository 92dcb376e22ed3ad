"""Tries, deaths and take-overs of deliveries, to a real endpoint."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest

from gateway.metrics import Metrics
from gateway.store.state import Store, StoredState
from gateway.store.webhooks import EVENT_TYPES, Webhook
from gateway.webhooks.dispatcher import LEASE_S, Deliverer, pause_s
from gateway.webhooks.sending import Sender
from shared import settings
from shared.settings import GatewaySettings
from tests.support import PATIENCE_S
from tests.support.gateway.webhooks import FAILED, OK, Receiver, fail_a_batch, receiving

LOOPBACK = (ip_network("127.0.0.0/8"),)
AT_ONCE = 1e-9


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = Store(settings.load(GatewaySettings, data_dir=tmp_path))
    yield store
    await store.close()


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as receiver:
        yield receiver


def deliverer(
    store: Store,
    metrics: Metrics | None = None,
    max_tries: int = 16,
    lease_s: float = LEASE_S,
    **timing: float,
) -> Deliverer:
    return Deliverer(
        store,
        Sender(LOOPBACK, timeout_s=PATIENCE_S),
        metrics or Metrics(),
        max_tries=max_tries,
        first_pause_s=AT_ONCE,
        lease_s=lease_s,
        **timing,
    )


async def listening_to(state: StoredState, receiver: Receiver) -> Webhook:
    return await state.webhooks.add(tenant="", name="", url=receiver.url, event_types=EVENT_TYPES)


async def try_once(one: Deliverer, state: StoredState) -> None:
    """Try what is due, and wait for the ends of the tries."""
    async with asyncio.TaskGroup() as tasks:
        await one.start_due(state.webhooks, tasks)


@asynccontextmanager
async def running(one: Deliverer) -> AsyncIterator[None]:
    task = asyncio.create_task(one.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def counted(metrics: Metrics) -> dict[str, float]:
    def value(outcome: str) -> float:
        sample = {"outcome": outcome}
        return metrics.catalog.registry.get_sample_value(name, sample) or 0

    name = "warren_gateway_webhooks_total"
    return {outcome: value(outcome) for outcome in ("delivered", "retried", "dead")}


async def test_what_ended_before_a_gateway_died_is_delivered_by_another(
    store: Store, receiver: Receiver
) -> None:
    state = await store.open()
    webhook = await listening_to(state, receiver)
    batch = await fail_a_batch(state.files, state.batches)

    async with running(deliverer(store)):
        (received,) = await receiver.wait()

    event = received.unwrapped(webhook.secret)
    assert (event.type, event.data.id) == ("batch.failed", batch.id)


async def test_a_gateway_that_dies_while_it_delivers_is_replaced(
    store: Store, receiver: Receiver
) -> None:
    state = await store.open()
    await listening_to(state, receiver)
    receiver.holds = 1
    await fail_a_batch(state.files, state.batches)

    async with running(deliverer(store, lease_s=0)):
        await receiver.wait()
    receiver.release()
    async with running(deliverer(store)):
        received = await receiver.wait(2)

    assert len({one.headers["webhook-id"] for one in received}) == 1


async def test_a_failure_is_tried_again_with_the_same_event(
    store: Store, receiver: Receiver
) -> None:
    state, metrics = await store.open(), Metrics()
    webhook = await listening_to(state, receiver)
    receiver.answers = [FAILED, b"", OK]
    await fail_a_batch(state.files, state.batches)

    one = deliverer(store, metrics)
    for _ in range(4):
        await try_once(one, state)

    events = [received.unwrapped(webhook.secret) for received in receiver.received]
    assert len(events) == 3
    assert events[0] == events[1] == events[2]
    assert counted(metrics) == {"delivered": 1, "retried": 2, "dead": 0}


async def test_a_delivery_that_failed_too_often_is_dead_until_it_is_retried(
    store: Store, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    state, metrics = await store.open(), Metrics()
    await listening_to(state, receiver)
    receiver.answers = [FAILED]
    await fail_a_batch(state.files, state.batches)

    one = deliverer(store, metrics, max_tries=2)
    for _ in range(3):
        await try_once(one, state)

    (dead,) = await state.webhooks.dead(10)
    assert (dead.num_tries, dead.reason, len(receiver.received)) == (2, "status 500", 2)
    assert counted(metrics) == {"delivered": 0, "retried": 1, "dead": 1}
    assert [record.message for record in caplog.records] == [
        "webhook is tried again",
        "webhook dead",
    ]
    receiver.answers = [OK]
    await state.webhooks.retry(dead.id)
    await try_once(one, state)
    assert counted(metrics)["delivered"] == 1
    assert await state.webhooks.dead(10) == []


async def test_a_delivery_that_has_been_due_for_days_is_dead(
    store: Store, receiver: Receiver
) -> None:
    state, metrics = await store.open(), Metrics()
    await listening_to(state, receiver)
    for _ in range(2):
        await fail_a_batch(state.files, state.batches)
    late = await state.webhooks.claim([], lease_s=-4 * 24 * 3600)

    one = deliverer(store, metrics)
    await one.expire(state.webhooks)
    await try_once(one, state)

    (dead,) = await state.webhooks.dead(10)
    assert late is not None
    assert (dead.id, dead.reason) == (late.id, "not tried in time")
    assert len(receiver.received) == 1
    assert counted(metrics) == {"delivered": 1, "retried": 0, "dead": 1}


async def test_a_gateway_tries_what_waited_while_no_gateway_ran(
    store: Store, receiver: Receiver
) -> None:
    state, metrics = await store.open(), Metrics()
    await listening_to(state, receiver)
    await fail_a_batch(state.files, state.batches)
    await state.webhooks.claim([], lease_s=-4 * 24 * 3600)

    async with running(deliverer(store, metrics)):
        await receiver.wait(1)

    assert counted(metrics)["dead"] == 0


async def test_a_slow_endpoint_does_not_hold_up_the_others(
    store: Store, receiver: Receiver
) -> None:
    state = await store.open()
    async with receiving() as slow:
        slow.holds = 100
        await listening_to(state, slow)
        await listening_to(state, receiver)
        for _ in range(6):
            await fail_a_batch(state.files, state.batches)

        async with running(deliverer(store)):
            await receiver.wait(6)
            num_at_once = len(await slow.wait(4))
        slow.release()

    assert num_at_once == 4


async def test_a_fast_endpoint_gets_its_events_without_pauses(
    store: Store, receiver: Receiver
) -> None:
    state = await store.open()
    await listening_to(state, receiver)
    for _ in range(9):
        await fail_a_batch(state.files, state.batches)

    async with running(deliverer(store, look_interval_s=3600.0)):
        await receiver.wait(9)


def test_pauses_grow_at_random_up_to_six_hours() -> None:
    drawn: Any = {tries: [pause_s(tries, 5) for _ in range(100)] for tries in (1, 2, 3, 100)}

    for tries, longest in ((1, 5), (2, 10), (3, 20), (100, 6 * 3600)):
        assert longest / 2 <= min(drawn[tries]) < max(drawn[tries]) <= longest
