"""What every bus promises about deliveries."""

import asyncio

import pytest

from shared.bus.base import Bus, Consumer, Message, Queue
from shared.errors import BusUnavailable, QueueNotFound
from tests.shared.bus.deliveries import (
    eventually,
    is_quiet,
    numbered,
    publish,
    take,
    take_bodies,
    take_to_the_end,
)
from tests.shared.bus.wires import MAX_BYTES, QueueMaker, Wires

KINDS = pytest.mark.parametrize("kind", ["classic", "quorum"])


async def test_a_message_arrives_as_it_was_sent(bus: Bus, make_queue: QueueMaker) -> None:
    queue = make_queue()
    message = Message(
        b"body",
        content_type="application/json",
        correlation_id="request-1",
        reply_to="reply.1",
        headers={"text": "é", "number": -7},
        user_id=bus.user,
    )
    await bus.declare(queue)
    await bus.publish(queue.bindings[0], message)

    async with bus.consume(queue.name) as consumer:
        [delivery] = await take(consumer)

    assert delivery.message == message


@pytest.mark.parametrize("num_bytes", [0, 1, 300_000, MAX_BYTES])
async def test_a_body_of_any_allowed_size_arrives_whole(
    bus: Bus, make_queue: QueueMaker, num_bytes: int
) -> None:
    queue = make_queue()
    body = bytes(range(256)) * (num_bytes // 256) + bytes(num_bytes % 256)
    await bus.declare(queue)
    await publish(bus, queue, [body])

    async with bus.consume(queue.name) as consumer:
        assert await take_bodies(consumer, 1) == [body]


@KINDS
async def test_an_acknowledged_message_never_comes_again(
    bus: Bus, make_queue: QueueMaker, kind: str
) -> None:
    queue = make_queue(kind=kind)
    await bus.declare(queue)
    await publish(bus, queue, numbered(2))
    async with bus.consume(queue.name) as consumer:
        [first, _] = await take(consumer, 2)
        await first.ack()

    async with bus.consume(queue.name) as consumer:
        assert await take_bodies(consumer, 1) == [b"1"]
        assert await is_quiet(consumer)


async def test_acknowledging_twice_is_harmless(bus: Bus, queue: Queue) -> None:
    await publish(bus, queue, numbered(2))

    async with bus.consume(queue.name) as consumer:
        [first, second] = await take(consumer, 2)
        await first.ack()
        await first.ack()
        await first.reject(requeue=True)
        await second.ack()
        assert await is_quiet(consumer)

    assert await bus.inspect(queue.name) is not None


@KINDS
async def test_closing_gives_unacknowledged_messages_back_in_order(
    bus: Bus, make_queue: QueueMaker, kind: str
) -> None:
    queue = make_queue(kind=kind, delivery_limit=20 if kind == "quorum" else None)
    await bus.declare(queue)
    await publish(bus, queue, numbered(30))
    async with bus.consume(queue.name, prefetch=20) as consumer:
        deliveries = await take(consumer, 20)
        await deliveries[3].ack()

    async with bus.consume(queue.name) as consumer:
        bodies = await take_bodies(consumer, 29)

    assert bodies == [body for body in numbered(30) if body != b"3"]


async def test_a_log_that_is_never_acknowledged_can_be_read_again_and_again(
    bus: Bus, queue: Queue
) -> None:
    readings = []
    for count in (10, 20, 30):
        await publish(bus, queue, numbered(30)[count - 10 : count])
        async with bus.consume(queue.name, is_exclusive=True) as consumer:
            readings.append(await take_bodies(consumer, count))

    assert readings == [numbered(10), numbered(20), numbered(30)]


async def test_returns_are_counted(bus: Bus, make_queue: QueueMaker) -> None:
    queue = make_queue(kind="quorum", delivery_limit=20)
    await bus.declare(queue)
    await publish(bus, queue, [b"job"])
    counts = []
    for _ in range(3):
        async with bus.consume(queue.name) as consumer:
            [delivery] = await take(consumer)
            counts.append(delivery.num_returns)

    assert counts == [0, 1, 2]


async def test_a_publisher_cannot_claim_returns(bus: Bus, make_queue: QueueMaker) -> None:
    queue = make_queue(kind="quorum", delivery_limit=20)
    await bus.declare(queue)
    await bus.publish(queue.bindings[0], Message(b"job", headers={"x-delivery-count": 8}))
    counts = []
    for _ in range(2):
        async with bus.consume(queue.name) as consumer:
            [delivery] = await take(consumer)
            counts.append(delivery.num_returns)

    assert counts == [0, 1]


async def test_a_returned_message_of_a_classic_queue_is_known_as_one(
    bus: Bus, queue: Queue
) -> None:
    await publish(bus, queue, [b"job"])
    async with bus.consume(queue.name) as consumer:
        [fresh] = await take(consumer)
    async with bus.consume(queue.name) as consumer:
        [returned] = await take(consumer)

    assert (fresh.num_returns, returned.num_returns) == (0, 1)


@KINDS
async def test_a_lost_connection_gives_its_deliveries_to_others(
    wires: Wires, bus: Bus, other_bus: Bus, make_queue: QueueMaker, kind: str
) -> None:
    queue = make_queue(kind=kind)
    await bus.declare(queue)
    await publish(bus, queue, numbered(3))

    async with other_bus.consume(queue.name) as lost:
        await take(lost, 3)
        async with bus.consume(queue.name) as consumer:
            wires.sever(other_bus)
            returned = await take(consumer, 3)

    assert [delivery.message.body for delivery in returned] == numbered(3)
    assert [delivery.num_returns for delivery in returned] == [1, 1, 1]


async def test_iteration_says_that_the_connection_was_lost(
    wires: Wires, bus: Bus, queue: Queue
) -> None:
    await publish(bus, queue, numbered(2))

    async with bus.consume(queue.name) as consumer:
        await take(consumer)
        wires.sever(bus)
        with pytest.raises(BusUnavailable):
            await take_to_the_end(consumer)


async def test_settling_after_the_connection_was_lost_is_harmless(
    wires: Wires, bus: Bus, queue: Queue
) -> None:
    await publish(bus, queue, numbered(2))
    async with bus.consume(queue.name) as consumer:
        [first, second] = await take(consumer, 2)
        wires.sever(bus)
        with pytest.raises(BusUnavailable):
            await take(consumer)
        await first.ack()
        await second.reject()
    await first.ack()

    await bus.wait_connected()
    async with bus.consume(queue.name) as consumer:
        assert await take_bodies(consumer, 2) == numbered(2)


async def test_no_more_than_prefetch_are_in_hand(bus: Bus, queue: Queue) -> None:
    await publish(bus, queue, numbered(6))

    async with bus.consume(queue.name, prefetch=3) as consumer:
        [first, *_] = await take(consumer, 3)
        assert await is_quiet(consumer)
        await first.ack()
        assert await take_bodies(consumer, 1) == [b"3"]
        assert await is_quiet(consumer)


async def test_consumers_share_a_queue_evenly(bus: Bus, other_bus: Bus, queue: Queue) -> None:
    async with bus.consume(queue.name) as one, other_bus.consume(queue.name) as two:
        await publish(bus, queue, numbered(10))
        bodies = await take_bodies(one, 5) + await take_bodies(two, 5)

    assert sorted(bodies) == numbered(10)


async def test_a_returned_message_goes_to_the_head_of_its_queue(
    bus: Bus, make_queue: QueueMaker
) -> None:
    queue = make_queue(kind="quorum", delivery_limit=20)
    await bus.declare(queue)
    await publish(bus, queue, numbered(5))

    async with bus.consume(queue.name, prefetch=1) as consumer:
        [delivery] = await take(consumer)
        await delivery.reject(requeue=True)
        [again] = await take(consumer)

    assert (again.message.body, again.num_returns) == (b"0", 1)


async def test_stopping_ends_iteration_after_what_is_in_hand(bus: Bus, queue: Queue) -> None:
    await publish(bus, queue, numbered(3))

    async with bus.consume(queue.name) as consumer:
        [first] = await take(consumer)
        await eventually(lambda: has_ready(bus, queue, 0))
        await consumer.stop()
        await publish(bus, queue, [b"later"])
        rest = [delivery async for delivery in consumer]
        for delivery in (first, *rest):
            await delivery.ack()

    assert [delivery.message.body for delivery in rest] == [b"1", b"2"]
    await eventually(lambda: has_ready(bus, queue, 1))


async def test_a_cancelled_wait_loses_no_message(bus: Bus, queue: Queue) -> None:
    async with bus.consume(queue.name) as consumer:
        for _ in range(3):
            waiting = asyncio.ensure_future(consumer.__anext__())
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        await publish(bus, queue, numbered(2))
        assert await take_bodies(consumer, 2) == numbered(2)


async def test_deleting_a_queue_ends_its_consumers(bus: Bus, other_bus: Bus, queue: Queue) -> None:
    async with bus.consume(queue.name) as consumer:
        await other_bus.delete_queue(queue.name)
        with pytest.raises(QueueNotFound):
            await take(consumer)


async def has_ready(bus: Bus, queue: Queue, count: int) -> bool:
    state = await bus.inspect(queue.name)
    return state is not None and state.num_ready == count


async def test_messages_that_gather_arrive_once_and_in_order(bus: Bus, queue: Queue) -> None:
    """Whenever a consumer begins and ceases to let them gather."""
    bodies = numbered(200)

    async def publish_and_toggle(consumer: Consumer) -> None:
        for start in range(0, len(bodies), 20):
            consumer.gather(0.02 * (start // 20 % 3))
            await publish(bus, queue, bodies[start : start + 20])

    async with bus.consume(queue.name) as consumer:
        publishing = asyncio.create_task(publish_and_toggle(consumer))
        received = await take(consumer, len(bodies))
        await publishing
        assert [delivery.message.body for delivery in received] == bodies
        for delivery in received:
            await delivery.ack()
        assert await is_quiet(consumer)

    state = await bus.inspect(queue.name)
    assert state is not None
    assert state.num_ready == 0


async def test_what_gathered_and_was_not_acknowledged_comes_again(bus: Bus, queue: Queue) -> None:
    async with bus.consume(queue.name) as consumer:
        consumer.gather(0.02)
        await publish(bus, queue, numbered(3))
        first, *_ = await take(consumer, 3)
        await first.ack()
        await consumer.stop()
        with pytest.raises(StopAsyncIteration):
            await anext(consumer)

    async with bus.consume(queue.name) as consumer:
        assert await take_bodies(consumer, 2) == numbered(3)[1:]


async def test_a_consumer_whose_messages_gather_notices_the_end_of_its_queue(
    bus: Bus, other_bus: Bus, queue: Queue
) -> None:
    async with bus.consume(queue.name) as consumer:
        consumer.gather(0.02)
        await other_bus.delete_queue(queue.name)
        with pytest.raises(QueueNotFound):
            await take(consumer)


async def test_a_lost_connection_ends_a_consumer_whose_messages_gather(
    wires: Wires, bus: Bus, queue: Queue
) -> None:
    async with bus.consume(queue.name) as consumer:
        consumer.gather(0.02)
        wires.sever(bus)
        with pytest.raises(BusUnavailable):
            await take(consumer)
