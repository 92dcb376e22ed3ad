"""A subscription keeps consuming, whatever is lost underneath it."""

import asyncio
import logging
from dataclasses import replace
from itertools import pairwise

import pytest

from shared.bus.base import Bus, Delivery, Message, Queue, QueueState
from shared.bus.memory import MemoryBus
from shared.bus.subscribe import Attached, Gathering, Lost, Rhythm, Subscription, receive
from shared.errors import (
    BusError,
    BusUnavailable,
    QueueBusy,
    QueueNotFound,
    UndecodableMessage,
)
from shared.telemetry import incidents
from tests.shared.bus.deliveries import QUIET_S, eventually, numbered, publish
from tests.shared.bus.wires import QueueMaker, Wires

Item = Delivery | Attached | Lost
BUSY_PAUSES_S = [0.01, 0.02, 0.04, 0.08]


async def take(subscription: Subscription, count: int = 1) -> list[Item]:
    return [await anext(subscription) for _ in range(count)]


async def take_until_attached(subscription: Subscription) -> tuple[Attached, list[BusError]]:
    """The next `Attached`, and the errors of every `Lost` before it."""
    errors: list[BusError] = []
    async for item in subscription:
        if isinstance(item, Attached):
            return item, errors
        assert isinstance(item, Lost)
        errors.append(item.error)
    raise AssertionError("the subscription ended")


async def take_rest(subscription: Subscription) -> list[Item]:
    return [item async for item in subscription]


def bodies(items: list[Item]) -> list[bytes]:
    deliveries = [item for item in items if not isinstance(item, Attached | Lost)]
    assert len(deliveries) == len(items)
    return [delivery.message.body for delivery in deliveries]


async def test_deliveries_follow_the_attachment(bus: Bus, queue: Queue) -> None:
    await publish(bus, queue, numbered(3))

    async with Subscription(bus, queue.name) as subscription:
        attached, *deliveries = await take(subscription, 4)

    assert attached == Attached(was_deleted=False)
    assert bodies(deliveries) == numbered(3)


async def test_no_more_than_prefetch_are_in_hand(bus: Bus, queue: Queue) -> None:
    await publish(bus, queue, numbered(3))

    async with Subscription(bus, queue.name, prefetch=2) as subscription:
        await take(subscription, 3)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(subscription), QUIET_S)


async def test_a_lost_connection_brings_back_everything_unsettled_in_order(
    wires: Wires, bus: Bus, queue: Queue
) -> None:
    await publish(bus, queue, numbered(4))

    async with Subscription(bus, queue.name, is_exclusive=True) as subscription:
        _, first, *_ = await take(subscription, 5)
        assert not isinstance(first, Attached | Lost)
        wires.sever(bus)
        [lost] = await take(subscription)
        await first.ack()
        attached, _ = await take_until_attached(subscription)
        again = await take(subscription, 4)

    assert isinstance(lost, Lost)
    assert isinstance(lost.error, BusUnavailable)
    assert attached == Attached(was_deleted=False)
    assert bodies(again) == numbered(4)


async def test_an_exclusive_queue_is_consumed_again_after_each_loss(
    wires: Wires, bus: Bus, make_queue: QueueMaker
) -> None:
    queue = make_queue(is_exclusive=True)

    async with Subscription(bus, queue.name, declare=(queue,)) as subscription:
        await take(subscription)
        for body in numbered(3):
            wires.sever(bus)
            await take_until_attached(subscription)
            await publish(bus, queue, [body])
            assert bodies(await take(subscription)) == [body]


async def test_a_subscription_waits_for_the_first_connection(
    wires: Wires, bus: Bus, make_queue: QueueMaker
) -> None:
    queue = make_queue()
    wires.sever(bus)

    async with Subscription(bus, queue.name, declare=(queue,)) as subscription:
        attached, _ = await take_until_attached(subscription)

    assert attached == Attached(was_deleted=False)


async def test_a_deleted_queue_is_declared_again_and_said_to_be_empty(
    bus: Bus, other_bus: Bus, make_queue: QueueMaker
) -> None:
    queue = make_queue()

    async with Subscription(bus, queue.name, declare=(queue,)) as subscription:
        [first] = await take(subscription)
        await other_bus.delete_queue(queue.name)
        [lost] = await take(subscription)
        attached, _ = await take_until_attached(subscription)
        await publish(other_bus, queue, [b"new"])
        assert bodies(await take(subscription)) == [b"new"]

    assert first == Attached(was_deleted=False)
    assert isinstance(lost, Lost)
    assert isinstance(lost.error, QueueNotFound)
    assert attached == Attached(was_deleted=True)


async def test_a_queue_deleted_while_disconnected_is_noticed(
    wires: Wires, bus: Bus, other_bus: Bus, make_queue: QueueMaker
) -> None:
    queue = make_queue()

    async with Subscription(bus, queue.name, declare=(queue,)) as subscription:
        await take(subscription)
        wires.sever(bus)
        await other_bus.delete_queue(queue.name)
        attached, errors = await take_until_attached(subscription)
        while not attached.was_deleted:  # it was attached before the deletion
            attached, errors = await take_until_attached(subscription)

    assert isinstance(errors[-1], QueueNotFound)


async def test_a_consumer_whose_queue_was_replaced_is_replaced_as_well(
    bus: Bus, other_bus: Bus, make_queue: QueueMaker
) -> None:
    """The broker cancels the consumer, and yet the queue exists."""
    queue = make_queue()

    async with Subscription(bus, queue.name, declare=(queue,)) as subscription:
        await take(subscription)
        await other_bus.delete_queue(queue.name)
        await other_bus.declare(queue)
        await publish(other_bus, queue, [b"new"])
        await take_until_attached(subscription)
        assert bodies(await take(subscription)) == [b"new"]


async def test_without_a_declaration_a_missing_queue_is_an_error(
    bus: Bus, make_queue: QueueMaker
) -> None:
    async with Subscription(bus, make_queue().name) as subscription:
        with pytest.raises(QueueNotFound):
            await take(subscription)


async def test_without_a_declaration_the_deletion_of_the_queue_is_an_error(
    bus: Bus, other_bus: Bus, queue: Queue
) -> None:
    async with Subscription(bus, queue.name) as subscription:
        await take(subscription)
        await other_bus.delete_queue(queue.name)
        with pytest.raises(QueueNotFound):
            await take(subscription)


async def test_a_queue_with_other_properties_is_an_error(bus: Bus, queue: Queue) -> None:
    unlike = replace(queue, max_length=1)

    async with Subscription(bus, queue.name, declare=(unlike,)) as subscription:
        with pytest.raises(BusError):
            await take(subscription)


async def test_a_busy_queue_is_attached_to_once_it_is_released(
    bus: Bus, other_bus: Bus, queue: Queue
) -> None:
    await publish(bus, queue, numbered(2))

    async with Subscription(bus, queue.name, is_exclusive=True) as subscription:
        async with other_bus.consume(queue.name, is_exclusive=True):
            busy = await take(subscription, 3)
        await take_until_attached(subscription)
        again = await take(subscription, 2)

    assert all(isinstance(item, Lost) and isinstance(item.error, QueueBusy) for item in busy)
    assert bodies(again) == numbered(2)


async def test_a_busy_queue_is_asked_for_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shared.bus.subscribe._RETRY_PAUSE_S", 0.01)
    lost_at: list[float] = []
    async with MemoryBus() as bus, Subscription(bus, "q", is_exclusive=True) as subscription:
        await bus.declare(Queue("q"))
        async with bus.consume("q", is_exclusive=True):
            for _ in range(5):
                await take(subscription)
                lost_at.append(asyncio.get_running_loop().time())

    pauses_s = [after - before for before, after in pairwise(lost_at)]
    assert all(pause_s >= least_s for pause_s, least_s in zip(pauses_s, BUSY_PAUSES_S, strict=True))


async def test_a_cancelled_wait_loses_no_message(bus: Bus, queue: Queue) -> None:
    async with Subscription(bus, queue.name) as subscription:
        await take(subscription)
        for _ in range(3):
            waiting = asyncio.ensure_future(take(subscription))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
        await publish(bus, queue, numbered(2))
        assert bodies(await take(subscription, 2)) == numbered(2)


async def test_an_attachment_that_is_cancelled_holds_nothing(
    bus: Bus, other_bus: Bus, queue: Queue
) -> None:
    subscription = Subscription(bus, queue.name, is_exclusive=True)
    waiting = asyncio.ensure_future(take(subscription))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    await subscription.close()

    async with other_bus.consume(queue.name, is_exclusive=True) as consumer:
        assert consumer.is_open


async def test_closing_returns_what_is_unsettled(bus: Bus, queue: Queue) -> None:
    await publish(bus, queue, numbered(2))
    async with Subscription(bus, queue.name) as first:
        await take(first, 3)
        await first.close()
        await first.close()

    async with Subscription(bus, queue.name) as second:
        _, *deliveries = await take(second, 3)

    assert bodies(deliveries) == numbered(2)


async def test_stopping_ends_iteration_and_keeps_what_is_in_hand(bus: Bus, queue: Queue) -> None:
    await publish(bus, queue, numbered(2))

    async with Subscription(bus, queue.name) as subscription:
        _, *deliveries = await take(subscription, 3)
        await subscription.stop()
        await publish(bus, queue, [b"later"])
        assert await take_rest(subscription) == []
        for delivery in deliveries:
            assert not isinstance(delivery, Attached | Lost)
            await delivery.ack()

    async def holds_only_the_later_one() -> bool:
        state = await bus.inspect(queue.name)
        return state is not None and state.num_ready == 1

    await eventually(holds_only_the_later_one)


async def test_a_subscription_stopped_in_advance_never_attaches(
    bus: Bus, make_queue: QueueMaker
) -> None:
    async with Subscription(bus, make_queue().name) as subscription:
        await subscription.stop()
        assert await take_rest(subscription) == []


async def test_stopping_ends_a_reconnection(wires: Wires, bus: Bus, make_queue: QueueMaker) -> None:
    queue = make_queue()

    async with Subscription(bus, queue.name, declare=(queue,)) as subscription:
        await take(subscription)
        wires.sever(bus)
        await take(subscription)
        rest = asyncio.ensure_future(take_rest(subscription))
        await asyncio.sleep(0)
        await subscription.stop()
        await subscription.stop()
        assert await rest == []


async def test_stopping_ends_the_wait_for_a_broker_that_never_comes() -> None:
    async with Subscription(MemoryBus(), "jobs") as subscription:
        rest = asyncio.ensure_future(take_rest(subscription))
        await asyncio.sleep(QUIET_S)
        await subscription.stop()
        assert await rest == []


async def test_stopping_at_the_moment_of_attaching_ends_iteration() -> None:
    bus, queue = MemoryBus(), Queue("jobs")
    async with Subscription(bus, queue.name, declare=(queue,)) as subscription:
        rest = asyncio.ensure_future(take_rest(subscription))
        await asyncio.sleep(0)
        async with bus:  # connected, and stopped before that is noticed
            await subscription.stop()
            await rest
            state = await bus.inspect(queue.name)

    assert state == QueueState(num_ready=0, num_consumers=0)


async def test_a_loss_and_the_recovery_from_it_are_logged_once(
    bus: Bus, other_bus: Bus, make_queue: QueueMaker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "shared.bus.subscribe")
    queue = make_queue()
    await bus.declare(queue)

    async with Subscription(bus, queue.name, is_exclusive=True) as subscription:
        async with other_bus.consume(queue.name, is_exclusive=True):
            await take(subscription, 3)
        await take_until_attached(subscription)

    records = [record for record in caplog.records if record.name == "shared.bus.subscribe"]
    assert [record.message for record in records] == [
        "cannot consume queue, retrying",
        "queue consumed again",
    ]


async def test_received_messages_are_acknowledged_whatever_becomes_of_them(
    bus: Bus, make_queue: QueueMaker, caplog: pytest.LogCaptureFixture
) -> None:
    queue = make_queue()
    handled: asyncio.Queue[bytes] = asyncio.Queue()

    def handle(message: Message) -> None:
        handled.put_nowait(message.body)
        if message.body == b"0":
            raise UndecodableMessage("no message")
        if message.body == b"1":
            raise ValueError("a bug")

    num_reported = incidents.num_reported("task")
    await bus.declare(queue)
    receiving = asyncio.create_task(receive(bus, queue, handle))
    await publish(bus, queue, numbered(3))
    assert [await handled.get() for _ in range(3)] == numbered(3)
    receiving.cancel()
    await asyncio.wait([receiving])

    state = await bus.inspect(queue.name)
    assert state is not None
    assert (state.num_ready, state.num_consumers) == (0, 0)
    assert incidents.num_reported("task") == num_reported + 1
    assert "undecodable message dropped" in caplog.messages


@pytest.mark.parametrize(
    ("per_s", "expected"),
    [([10, 10], [0.0, 0.0]), ([100, 100, 40, 10], [0.25, 0.25, 0.25, 0.0])],
)
def test_messages_gather_while_they_are_many(per_s: list[int], expected: list[float]) -> None:
    """Between the two limits, nothing changes."""
    now = 0.0
    rhythm = Rhythm(Gathering(), clock=lambda: now)

    intervals = []
    for rate in per_s:
        for _ in range(rate + 1):
            now += 1 / rate
            rhythm.count()
        intervals.append(rhythm.interval_s)

    assert intervals == expected


async def test_messages_that_gather_are_handled_in_order(bus: Bus, make_queue: QueueMaker) -> None:
    queue = make_queue()
    handled: asyncio.Queue[bytes] = asyncio.Queue()
    many = Gathering(many_per_s=0.0, few_per_s=0.0, interval_s=0.01, window_s=0.0)
    await bus.declare(queue)

    receiving = asyncio.create_task(
        receive(bus, queue, lambda message: handled.put_nowait(message.body), gathering=many)
    )
    for part in range(3):
        bodies = [b"%d-%d" % (part, k) for k in range(5)]
        await publish(bus, queue, bodies)
        assert [await handled.get() for _ in range(5)] == bodies
    receiving.cancel()
    await asyncio.wait([receiving])
