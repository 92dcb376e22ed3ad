"""What every bus promises about exchanges, queues and bindings that an operator has removed."""

import dataclasses
import uuid

import pytest

from shared.bus.base import Binding, Bus, Exchange, Message, Queue
from shared.errors import QueueNotFound, Unroutable
from tests.shared.bus.deliveries import take_bodies
from tests.shared.bus.wires import QueueMaker, Wires

KINDS = pytest.mark.parametrize("kind", ["direct", "topic", "fanout"])


@pytest.fixture
def exchange(kind: str) -> Exchange:
    name = f"warren.test.{uuid.uuid4().hex}"
    return Exchange(name, kind)  # type: ignore[arg-type] # (a parameter)


async def is_routed(bus: Bus, queue: Queue) -> bool:
    try:
        await bus.publish(queue.bindings[0], Message(b"here"))
    except Unroutable:
        return False
    async with bus.consume(queue.name) as consumer:
        return await take_bodies(consumer, 1) == [b"here"]


@KINDS
async def test_a_queue_that_is_declared_again_has_its_bindings(
    wires: Wires, bus: Bus, make_queue: QueueMaker, exchange: Exchange
) -> None:
    queue = make_queue(exchange)
    await bus.declare(queue)
    await wires.unbind(queue)
    assert not await is_routed(bus, queue)

    missing = await bus.declare_again(queue)

    assert missing == ()
    assert await is_routed(bus, queue)
    await wires.delete_exchange(exchange)


@KINDS
async def test_a_queue_that_is_bound_again_keeps_its_other_properties(
    wires: Wires, bus: Bus, make_queue: QueueMaker, exchange: Exchange
) -> None:
    queue = make_queue(exchange, expires_s=600.0)
    await bus.declare(queue)
    await wires.unbind(queue)

    await bus.bind(dataclasses.replace(queue, expires_s=None))

    assert await is_routed(bus, queue)
    await wires.delete_exchange(exchange)


@KINDS
async def test_an_exchange_that_was_deleted_is_named_and_declared_again(
    wires: Wires, bus: Bus, make_queue: QueueMaker, exchange: Exchange
) -> None:
    queue = make_queue(exchange)
    await bus.declare(queue)
    await wires.delete_exchange(exchange)

    missing = await bus.declare_again(queue)

    assert missing == (exchange.name,)
    assert await is_routed(bus, queue)
    await wires.delete_exchange(exchange)


async def test_a_queue_that_was_deleted_is_named_and_declared_again(
    bus: Bus, other_bus: Bus, queue: Queue
) -> None:
    await other_bus.delete_queue(queue.name)

    assert await bus.declare_again(queue) == (queue.name,)

    assert await is_routed(bus, queue)


async def test_nothing_is_missing_of_what_is_there(bus: Bus, queue: Queue) -> None:
    assert await bus.declare_again(queue.bindings[0].exchange, queue) == ()


async def test_only_a_queue_that_exists_is_bound(bus: Bus, queue: Queue) -> None:
    await bus.delete_queue(queue.name)

    with pytest.raises(QueueNotFound):
        await bus.bind(queue)


async def test_a_queue_is_bound_to_exchanges_that_exist_only(bus: Bus, queue: Queue) -> None:
    nowhere = Binding(Exchange(f"warren.test.{uuid.uuid4().hex}", "direct"), "key")

    with pytest.raises(QueueNotFound):
        await bus.bind(dataclasses.replace(queue, bindings=(nowhere,)))


async def test_the_dead_letter_exchange_of_a_queue_is_declared_again(
    wires: Wires, bus: Bus, make_queue: QueueMaker
) -> None:
    graves = Exchange(f"warren.test.{uuid.uuid4().hex}", "fanout")
    queue = make_queue(dead_letter=Binding(graves, ""))
    await bus.declare(queue)
    await wires.delete_exchange(graves)

    assert await bus.declare_again(queue) == (graves.name,)

    await wires.delete_exchange(graves)
