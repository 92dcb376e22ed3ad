"""What every bus promises about queues: exclusive readers, expiry, dead letters."""

import asyncio
import dataclasses
import time
from contextlib import suppress

import pytest

from shared.bus.base import (
    DEATH_QUEUE_HEADER,
    DEATH_REASON_HEADER,
    Binding,
    Bus,
    Exchange,
    Message,
    Queue,
    QueueState,
)
from shared.bus.subscribe import Attached, Lost, Subscription
from shared.errors import BusError, BusUnavailable, QueueBusy, QueueNotFound, Unroutable
from tests.shared.bus.deliveries import (
    eventually,
    is_quiet,
    numbered,
    publish,
    take,
    take_bodies,
    take_to_the_end,
)
from tests.shared.bus.wires import DIRECT, QueueMaker, Wires


@dataclasses.dataclass(frozen=True)
class Graveyard:
    """A queue with another queue for its dead letters."""

    living: Queue
    dead: Queue


@pytest.fixture
async def graveyard(request: pytest.FixtureRequest, bus: Bus, make_queue: QueueMaker) -> Graveyard:
    dead = make_queue()
    living = make_queue(dead_letter=dead.bindings[0], **getattr(request, "param", {}))
    await bus.declare(dead, living)
    return Graveyard(living, dead)


DELIVERY_LIMIT = 2
QUORUM = {"kind": "quorum", "delivery_limit": DELIVERY_LIMIT, "max_length": 100}
GRAVEYARDS = pytest.mark.parametrize("graveyard", [{}, QUORUM], indirect=True)


async def take_dead(bus: Bus, graveyard: Graveyard) -> Message:
    async with bus.consume(graveyard.dead.name) as consumer:
        [delivery] = await take(consumer)
        await delivery.ack()
    assert delivery.message.headers[DEATH_QUEUE_HEADER] == graveyard.living.name
    return delivery.message


@GRAVEYARDS
async def test_a_rejected_message_goes_to_the_dead_letters(bus: Bus, graveyard: Graveyard) -> None:
    message = Message(b"bad", correlation_id="request-1", headers={"trace": "t"})
    await bus.publish(graveyard.living.bindings[0], message)

    async with bus.consume(graveyard.living.name) as consumer:
        [delivery] = await take(consumer)
        await delivery.reject()

    dead = await take_dead(bus, graveyard)
    assert (dead.body, dead.correlation_id, dead.headers["trace"]) == (b"bad", "request-1", "t")
    assert dead.headers[DEATH_REASON_HEADER] == "rejected"


@GRAVEYARDS
async def test_a_dead_letter_has_the_times_of_its_publication_and_death(
    bus: Bus, graveyard: Graveyard
) -> None:
    await bus.publish(graveyard.living.bindings[0], Message(b"bad", published_at=1_700_000_000.0))

    async with bus.consume(graveyard.living.name) as consumer:
        [delivery] = await take(consumer)
        rejected_at = time.time()
        await delivery.reject()

    dead = await take_dead(bus, graveyard)
    assert (delivery.message.published_at, delivery.message.died_at) == (1_700_000_000.0, 0.0)
    assert dead.published_at == 1_700_000_000.0
    # Brokers count whole seconds, of clocks of their own.
    assert int(rejected_at) - 1 <= dead.died_at <= time.time() + 1


@pytest.mark.parametrize("graveyard", [QUORUM], indirect=True)
async def test_a_message_that_comes_back_too_often_goes_to_the_dead_letters(
    bus: Bus, graveyard: Graveyard
) -> None:
    await publish(bus, graveyard.living, [b"poison", b"innocent"])

    num_deliveries = 0
    async with bus.consume(graveyard.living.name, prefetch=1) as consumer:
        [delivery] = await take(consumer)
        while delivery.message.body == b"poison":
            num_deliveries += 1
            await delivery.reject(requeue=True)
            [delivery] = await take(consumer)

    assert num_deliveries == DELIVERY_LIMIT + 1
    dead = await take_dead(bus, graveyard)
    assert (dead.body, dead.headers[DEATH_REASON_HEADER]) == (b"poison", "delivery_limit")


TTL_S = 0.3
AGING = pytest.mark.parametrize("graveyard", [{**QUORUM, "ttl_s": TTL_S}], indirect=True)


@AGING
async def test_a_message_that_nobody_takes_in_time_goes_to_the_dead_letters(
    bus: Bus, graveyard: Graveyard
) -> None:
    await publish(bus, graveyard.living, [b"late"])

    dead = await take_dead(bus, graveyard)

    assert (dead.body, dead.headers[DEATH_REASON_HEADER]) == (b"late", "expired")


@AGING
async def test_a_delivered_message_expires_only_when_it_is_returned(
    bus: Bus, graveyard: Graveyard
) -> None:
    async with bus.consume(graveyard.living.name, prefetch=1) as consumer:
        # To a consumer that waits for it: on a busy machine it would expire before one comes.
        await publish(bus, graveyard.living, [b"busy"])
        await take(consumer)
        await asyncio.sleep(2 * TTL_S)
        async with bus.consume(graveyard.dead.name) as dead:
            was_alive = await is_quiet(dead)

    assert was_alive
    assert (await take_dead(bus, graveyard)).headers[DEATH_REASON_HEADER] == "expired"


async def test_an_unused_queue_expires(bus: Bus, make_queue: QueueMaker) -> None:
    queue = make_queue(expires_s=0.2)
    with suppress(QueueNotFound):  # on a busy machine it may expire before it is bound
        await bus.declare(queue)

    await eventually(lambda: is_unroutable(bus, queue))

    assert await bus.inspect(queue.name) is None


async def test_inspecting_renews_a_queues_expiry(bus: Bus, make_queue: QueueMaker) -> None:
    queue = make_queue(expires_s=2)

    is_renewed: bool | None = None
    while is_renewed is None:
        is_renewed = await is_renewed_by_inspections(bus, queue)

    assert is_renewed


async def test_a_queue_expires_only_after_its_last_consumer_left(
    bus: Bus, make_queue: QueueMaker
) -> None:
    queue = make_queue(expires_s=0.2)

    # It declares the queue again if that expires before it is consumed.
    async with Subscription(bus, queue.name, declare=(queue,)) as subscription:
        while not isinstance(await anext(subscription), Attached):
            pass
        await asyncio.sleep(0.5)
        await publish(bus, queue, [b"x"])
        delivery = await anext(subscription)
        assert not isinstance(delivery, Attached | Lost)
        assert delivery.message.body == b"x"
    await eventually(lambda: is_unroutable(bus, queue))

    assert await bus.inspect(queue.name) is None


async def test_an_exclusive_reader_keeps_others_out_and_is_followed_by_one(
    bus: Bus, other_bus: Bus, queue: Queue
) -> None:
    await publish(bus, queue, numbered(3))

    async with bus.consume(queue.name, is_exclusive=True) as first:
        await take(first, 3)
        for is_exclusive in (True, False):
            with pytest.raises(QueueBusy):
                await read_all(other_bus, queue, 3, is_exclusive=is_exclusive)
    bodies = await read_all(other_bus, queue, 3, is_exclusive=True)

    assert bodies == numbered(3)


async def test_no_exclusive_reader_beside_another_reader(
    bus: Bus, other_bus: Bus, queue: Queue
) -> None:
    async with bus.consume(queue.name):
        with pytest.raises(QueueBusy):
            await read_all(other_bus, queue, 0, is_exclusive=True)


async def test_an_exclusive_reader_is_let_go_even_if_its_task_is_cancelled_twice(
    bus: Bus, other_bus: Bus, queue: Queue
) -> None:
    async def read_forever() -> None:
        async with bus.consume(queue.name, is_exclusive=True) as consumer:
            await anext(consumer)

    reader = asyncio.create_task(read_forever())
    await eventually(lambda: has_consumers(bus, queue, 1))
    reader.cancel()
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.wait([reader])

    await eventually(lambda: has_consumers(bus, queue, 0))
    assert await read_all(other_bus, queue, 0, is_exclusive=True) == []


async def test_the_next_exclusive_reader_gets_the_log_of_a_lost_one(
    wires: Wires, bus: Bus, other_bus: Bus, queue: Queue
) -> None:
    await publish(bus, queue, numbered(50))

    async with other_bus.consume(queue.name, is_exclusive=True) as lost:
        await take(lost, 20)
        wires.sever(other_bus)
        while True:
            try:
                bodies = await read_all(bus, queue, 50, is_exclusive=True)
                break
            except QueueBusy:
                await asyncio.sleep(0.01)

    assert bodies == numbered(50)


async def test_an_exclusive_queue_is_its_connections_alone(
    bus: Bus, other_bus: Bus, make_queue: QueueMaker
) -> None:
    queue = make_queue(is_exclusive=True)
    await other_bus.declare(queue)

    with pytest.raises(QueueBusy):
        await bus.declare(queue)
    with pytest.raises(QueueBusy):
        await read_all(bus, queue, 0)
    with pytest.raises(QueueBusy):
        await bus.inspect(queue.name)
    await publish(bus, queue, [b"a command"])
    assert await read_all(other_bus, queue, 1) == [b"a command"]


async def test_an_exclusive_queue_goes_with_its_connection_and_comes_back_with_it(
    wires: Wires, bus: Bus, other_bus: Bus, make_queue: QueueMaker
) -> None:
    queue = make_queue(is_exclusive=True)
    await other_bus.declare(queue)
    await publish(bus, queue, [b"before"])
    async with other_bus.consume(queue.name) as consumer:
        wires.sever(other_bus)
        with pytest.raises(BusUnavailable):
            await take_to_the_end(consumer)

    await eventually(lambda: belongs_to(other_bus, queue))
    await publish(bus, queue, [b"after"])

    assert await read_all(other_bus, queue, 1) == [b"after"]


async def test_a_cancelled_declaration_leaves_no_exclusive_queue(
    bus: Bus, make_queue: QueueMaker
) -> None:
    left = []
    for delay_s in (0.0, 0.0005, 0.001, 0.002, 0.004, 0.008):
        queue = make_queue(is_exclusive=True)
        declaring = asyncio.create_task(bus.declare(queue))
        await asyncio.sleep(delay_s)
        declaring.cancel()
        await asyncio.wait([declaring])
        if declaring.cancelled():
            left.append(await bus.inspect(queue.name))

    assert not any(left)


async def test_a_lost_connection_comes_back_by_itself(wires: Wires, bus: Bus, queue: Queue) -> None:
    for round_ in numbered(2):
        async with bus.consume(queue.name) as consumer:
            wires.sever(bus)
            with pytest.raises(BusUnavailable):
                await take_to_the_end(consumer)
        with pytest.raises(BusUnavailable):
            await bus.inspect(queue.name)
        was_connected = bus.is_connected
        await bus.wait_connected()
        assert (was_connected, bus.is_connected) == (False, True)
        await publish(bus, queue, [round_])

    assert await read_all(bus, queue, 2) == numbered(2)


async def test_inspecting_counts_what_is_ready_and_who_consumes(bus: Bus, queue: Queue) -> None:
    await publish(bus, queue, numbered(5))
    idle = await bus.inspect(queue.name)

    async with bus.consume(queue.name, prefetch=2) as consumer:
        await take(consumer, 2)
        busy = await bus.inspect(queue.name)

    assert idle == QueueState(num_ready=5, num_consumers=0)
    assert busy == QueueState(num_ready=3, num_consumers=1)


async def test_a_queue_that_is_not_there(bus: Bus) -> None:
    assert await bus.inspect("test.nothing") is None
    await bus.delete_queue("test.nothing")
    with pytest.raises(QueueNotFound):
        async with bus.consume("test.nothing"):
            pass


async def test_declaring_again_changes_nothing(bus: Bus, make_queue: QueueMaker) -> None:
    queue = make_queue(max_length=10, expires_s=60)
    await bus.declare(DIRECT, queue)
    await publish(bus, queue, numbered(2))

    await bus.declare(DIRECT, queue)

    assert await read_all(bus, queue, 2) == numbered(2)


async def test_declaring_a_queue_with_other_properties_is_refused(
    bus: Bus, make_queue: QueueMaker
) -> None:
    queue = make_queue(expires_s=60)
    await bus.declare(queue)

    with pytest.raises(BusError, match=queue.name):
        await bus.declare(dataclasses.replace(queue, expires_s=61))


async def test_a_deleted_queue_takes_its_messages_and_its_binding_with_it(
    bus: Bus, queue: Queue
) -> None:
    await publish(bus, queue, numbered(2))
    await bus.delete_queue(queue.name)

    with pytest.raises(Unroutable):
        await publish(bus, queue, [b"x"])
    await bus.declare(queue)
    async with bus.consume(queue.name) as consumer:
        assert await is_quiet(consumer)


def test_a_classic_queue_cannot_promise_a_delivery_limit() -> None:
    with pytest.raises(ValueError, match="delivery limit"):
        Queue("q", (Binding(Exchange("e", "direct"), ""),), delivery_limit=1)


def test_a_quorum_queue_cannot_be_exclusive() -> None:
    with pytest.raises(ValueError, match="exclusive"):
        Queue("q", kind="quorum", is_exclusive=True)


async def read_all(
    bus: Bus, queue: Queue, count: int, *, is_exclusive: bool = False
) -> list[bytes]:
    async with bus.consume(queue.name, is_exclusive=is_exclusive) as consumer:
        return await take_bodies(consumer, count)


async def is_renewed_by_inspections(bus: Bus, queue: Queue) -> bool | None:
    """Whether a queue that is only inspected outlives its expiry. None: the machine stood still
    between two inspections, for so long that the queue may have expired."""
    assert queue.expires_s is not None
    clock = asyncio.get_running_loop().time
    began = used_at = clock()
    await bus.declare(queue)
    while clock() < began + 1.25 * queue.expires_s:
        await asyncio.sleep(0.02 * queue.expires_s)
        inspected_at = clock()
        if await bus.inspect(queue.name) is None:
            return False if clock() < used_at + queue.expires_s else None
        used_at = inspected_at
    return True


async def belongs_to(bus: Bus, queue: Queue) -> bool:
    """Whether an exclusive queue is that of a connection. A broker may keep the queue of the
    connection before for a while, and so long the new connection cannot declare it."""
    with suppress(QueueBusy, BusUnavailable):
        return await bus.inspect(queue.name) is not None
    return False


async def is_unroutable(bus: Bus, queue: Queue) -> bool:
    """Whether the queue no longer exists, by an operation that does not renew its expiry."""
    try:
        await publish(bus, queue, [b"x"])
    except Unroutable:
        return True
    return False


async def has_consumers(bus: Bus, queue: Queue, count: int) -> bool:
    state = await bus.inspect(queue.name)
    return state is not None and state.num_consumers == count
