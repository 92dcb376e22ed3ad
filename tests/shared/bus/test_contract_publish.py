"""What every bus promises about publishing and routing."""

import asyncio
import itertools
import uuid

import pytest

from shared.bus.base import Binding, Bus, Exchange, Message, Queue
from shared.errors import BusUnavailable, MessageTooLarge, PublishRefused, Unroutable
from tests.shared.bus.deliveries import is_quiet, numbered, publish, take, take_bodies
from tests.shared.bus.wires import DIRECT, MAX_BYTES, QueueMaker, Wires

TOPIC = Exchange("warren.test.topic", "topic")
FANOUT = Exchange("warren.test.fanout", "fanout")


@pytest.mark.parametrize(
    ("exchange", "bound", "published", "arrives"),
    [
        (DIRECT, "{0}.a", "{0}.a", True),
        (DIRECT, "{0}.a", "{0}.b", False),
        (DIRECT, "{0}.#", "{0}.a", False),
        (TOPIC, "{0}.a", "{0}.a", True),
        (TOPIC, "{0}.a", "{0}.a.b", False),
        (TOPIC, "{0}.*", "{0}.a", True),
        (TOPIC, "{0}.*", "{0}.a.b", False),
        (TOPIC, "{0}.*", "{0}", False),
        (TOPIC, "{0}.#", "{0}", True),
        (TOPIC, "{0}.#", "{0}.a.b", True),
        (TOPIC, "#.{0}", "x.y.{0}", True),
        (TOPIC, "*.{0}.c", "a.{0}.c", True),
        (TOPIC, "{0}.a*", "{0}.ab", False),
        (FANOUT, "", "anything", True),
        (FANOUT, "a", "b", True),
    ],
)
async def test_a_routing_key_finds_its_queues(
    bus: Bus,
    make_queue: QueueMaker,
    exchange: Exchange,
    bound: str,
    published: str,
    arrives: bool,
) -> None:
    unique = uuid.uuid4().hex
    queue = make_queue(exchange, bound.format(unique))
    everything = make_queue(exchange, published.format(unique))
    await bus.declare(queue, everything)

    await bus.publish(Binding(exchange, published.format(unique)), Message(b"x"))

    async with bus.consume(queue.name) as consumer:
        if arrives:
            await take(consumer)
        else:
            assert await is_quiet(consumer)


async def test_a_message_names_the_user_that_published_it(bus: Bus, queue: Queue) -> None:
    await bus.publish(queue.bindings[0], Message(b"x", user_id="somebody else"))

    async with bus.consume(queue.name) as consumer:
        delivery = await anext(consumer)

    assert delivery.message.user_id == bus.user != ""


async def test_a_queue_bound_twice_gets_a_message_once(bus: Bus, make_queue: QueueMaker) -> None:
    unique = uuid.uuid4().hex
    queue = make_queue(TOPIC, f"{unique}.a")
    both = type(queue)(queue.name, (*queue.bindings, Binding(TOPIC, f"{unique}.#")))
    await bus.declare(both)

    await publish(bus, queue, [b"x"])

    async with bus.consume(queue.name) as consumer:
        await take(consumer)
        assert await is_quiet(consumer)


async def test_a_message_that_no_queue_wants_is_refused(bus: Bus, make_queue: QueueMaker) -> None:
    await bus.declare(make_queue())

    with pytest.raises(Unroutable):
        await bus.publish(Binding(DIRECT, "nobody.listens"), Message(b"x"))


async def test_a_message_that_is_published_again_before_its_confirmation_is_refused_as_well(
    bus: Bus, make_queue: QueueMaker
) -> None:
    await bus.declare(make_queue())
    message = Message(b"x")

    outcomes = await asyncio.gather(
        *(bus.publish(Binding(DIRECT, "nobody.listens"), message) for _ in range(16)),
        return_exceptions=True,
    )

    assert [type(outcome) for outcome in outcomes] == [Unroutable] * 16


async def test_messages_that_are_published_at_once_are_refused_each_for_itself(
    bus: Bus, queue: Queue
) -> None:
    bindings = [queue.bindings[0], Binding(DIRECT, "nobody.listens")] * 16

    outcomes = await asyncio.gather(
        *(bus.publish(binding, Message(b"x")) for binding in bindings), return_exceptions=True
    )

    assert [type(outcome) for outcome in outcomes] == [type(None), Unroutable] * 16


async def test_a_publish_to_no_exchange_fails_alone(bus: Bus, queue: Queue) -> None:
    nowhere = Binding(Exchange("warren.test.nowhere", "direct"), "key")

    for _ in range(8):
        with pytest.raises(Unroutable):
            await bus.publish(nowhere, Message(b"x"))
    await publish(bus, queue, numbered(8))

    async with bus.consume(queue.name) as consumer:
        assert await take_bodies(consumer, 8) == numbered(8)


async def test_a_message_over_the_limit_is_not_sent(bus: Bus, queue: Queue) -> None:
    with pytest.raises(MessageTooLarge):
        await bus.publish(queue.bindings[0], Message(bytes(MAX_BYTES + 1)))

    assert bus.is_connected
    async with bus.consume(queue.name) as consumer:
        assert await is_quiet(consumer)


async def test_a_full_classic_queue_refuses_and_opens_again(
    bus: Bus, make_queue: QueueMaker
) -> None:
    queue = make_queue(max_length=3)
    await bus.declare(queue)
    await publish(bus, queue, numbered(3))
    with pytest.raises(PublishRefused):
        await publish(bus, queue, [b"one too many"])

    async with bus.consume(queue.name) as consumer:
        for delivery in await take(consumer, 3):
            await delivery.ack()
        assert await is_quiet(consumer)

    await publish(bus, queue, [b"room again"])


async def test_a_full_quorum_queue_refuses(bus: Bus, make_queue: QueueMaker) -> None:
    queue = make_queue(kind="quorum", max_length=10)
    await bus.declare(queue)

    with pytest.raises(PublishRefused):
        # RabbitMQ accepts a few more than it should.
        await publish(bus, queue, numbered(20))


async def test_publishers_at_once_each_keep_their_order(bus: Bus, make_queue: QueueMaker) -> None:
    num_publishers, num_messages = 40, 10
    queue = make_queue()
    await bus.declare(queue)

    async def publish_in_turn(name: int) -> None:
        await publish(bus, queue, (b"%d %d" % (name, k) for k in range(num_messages)))

    await asyncio.gather(*map(publish_in_turn, range(num_publishers)))

    async with bus.consume(queue.name) as consumer:
        bodies = await take_bodies(consumer, num_publishers * num_messages)
    arrived = [tuple(map(int, body.split())) for body in bodies]
    for name in range(num_publishers):
        assert [k for n, k in arrived if n == name] == list(range(num_messages))


async def test_what_is_published_while_the_connection_breaks_arrives_or_raises(
    wires: Wires, bus: Bus, other_bus: Bus, queue: Queue
) -> None:
    confirmed: list[bytes] = []

    some_are_confirmed = asyncio.Event()

    async def publish_until_it_breaks(name: int) -> None:
        for k in itertools.count():
            body = b"%d %d" % (name, k)
            await publish(bus, queue, [body])
            confirmed.append(body)
            if len(confirmed) == 100:
                some_are_confirmed.set()
            await asyncio.sleep(0)

    publishers = [asyncio.create_task(publish_until_it_breaks(n)) for n in range(10)]
    await some_are_confirmed.wait()
    wires.sever(bus)
    outcomes = await asyncio.gather(*publishers, return_exceptions=True)

    assert {type(outcome) for outcome in outcomes} == {BusUnavailable}
    async with other_bus.consume(queue.name) as consumer:
        # A publish that raised may have arrived as well, between the confirmed publishes.
        missing = set(confirmed)
        while missing:
            missing -= set(await take_bodies(consumer, 1))
