"""Confirmations of a broker, in whatever way it gives them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import pytest
from pamqp.commands import Basic

from shared.bus.base import Message, Queue
from shared.bus.rabbit import RabbitBus
from shared.errors import BusError, PublishRefused
from tests.shared.bus.deliveries import numbered, publish, take_bodies
from tests.shared.bus.wires import QueueMaker, connected_to
from tests.support.deployment.broker import Broker
from tests.support.network.amqp.frames import Frame
from tests.support.network.amqp.proxy import AmqpProxy, Conversation, Deal

pytestmark = pytest.mark.rabbit

NUM_MESSAGES = 6
TAGS = set(range(2, 2 + NUM_MESSAGES))
"""The first message of the channel is confirmed before the others are published."""
CONFIRMED, REFUSED = type(None), PublishRefused


@dataclass
class OwnConfirmations:
    """Drops the confirmations of the broker, in whose place the test confirms."""

    tags: set[int] = field(default_factory=set)
    """The delivery tags that the broker has confirmed."""
    are_there: asyncio.Event = field(default_factory=asyncio.Event)
    conversation: Conversation | None = None
    channel: int = 0

    def __call__(self, conversation: Conversation, frame: Frame) -> Deal | None:
        if frame.name != Basic.Ack.name:
            return None
        self.conversation, self.channel = conversation, frame.channel
        ack = frame.method
        assert isinstance(ack, Basic.Ack)
        assert ack.delivery_tag is not None
        self.tags |= {tag for tag in TAGS if tag < ack.delivery_tag and ack.multiple}
        self.tags.add(ack.delivery_tag)
        if self.tags >= TAGS:
            self.are_there.set()
        return lambda _conversation, _frame: None

    def say(self, answers: Sequence[Basic.Ack | Basic.Nack]) -> None:
        assert self.conversation is not None
        self.conversation.say(self.channel, *answers)


@pytest.fixture
async def proxy(broker: Broker) -> AsyncIterator[AmqpProxy]:
    async with AmqpProxy(broker.url) as proxy:
        yield proxy


@pytest.fixture
async def bus(proxy: AmqpProxy) -> AsyncIterator[RabbitBus]:
    """A bus with a single channel to publish, which is open."""
    async with connected_to(proxy.url, num_confirm_channels=1) as bus:
        yield bus


@pytest.fixture
async def queue(bus: RabbitBus, make_rabbit_queue: QueueMaker) -> Queue:
    """A queue with a message."""
    queue = make_rabbit_queue()
    await bus.declare(queue)
    await publish(bus, queue, [b"first"])
    return queue


@pytest.mark.parametrize(
    ("answers", "outcomes"),
    [
        ([Basic.Ack(7, multiple=True)], [CONFIRMED] * 6),
        ([Basic.Ack(0, multiple=True)], [CONFIRMED] * 6),
        ([Basic.Nack(7, multiple=True)], [REFUSED] * 6),
        (
            [Basic.Ack(3, multiple=True), Basic.Nack(5, multiple=True), Basic.Ack(7), Basic.Ack(6)],
            [CONFIRMED] * 2 + [REFUSED] * 2 + [CONFIRMED] * 2,
        ),
        (
            [Basic.Ack(4), Basic.Nack(0, multiple=True)],
            [REFUSED] * 2 + [CONFIRMED] + [REFUSED] * 3,
        ),
        (
            [Basic.Ack(5, multiple=True), Basic.Nack(7, multiple=True), Basic.Ack(7), Basic.Ack(9)],
            [CONFIRMED] * 4 + [REFUSED] * 2,
        ),
    ],
    ids=["a range", "all", "a refused range", "several ranges", "one before", "repeated"],
)
async def test_a_confirmation_of_several_messages_confirms_each_of_them(
    bus: RabbitBus,
    proxy: AmqpProxy,
    queue: Queue,
    answers: Sequence[Basic.Ack | Basic.Nack],
    outcomes: Sequence[type[PublishRefused | None]],
) -> None:
    proxy.policy = confirmations = OwnConfirmations()
    publishing = asyncio.gather(
        *(publish(bus, queue, [body]) for body in numbered(NUM_MESSAGES)), return_exceptions=True
    )
    await confirmations.are_there.wait()
    assert not publishing.done()

    confirmations.say(answers)

    assert [type(outcome) for outcome in await publishing] == outcomes
    await bus.wait_idle()


async def test_a_publish_that_is_cancelled_before_its_write_is_sent_and_confuses_no_other(
    bus: RabbitBus, queue: Queue
) -> None:
    bodies = numbered(3)
    publishes = [asyncio.create_task(publish(bus, queue, [body])) for body in bodies]
    await asyncio.sleep(0)

    publishes[1].cancel()
    outcomes = await asyncio.gather(*publishes, return_exceptions=True)

    assert [type(outcome) for outcome in outcomes] == [CONFIRMED, asyncio.CancelledError, CONFIRMED]
    async with bus.consume(queue.name) as consumer:
        assert await take_bodies(consumer, 4) == [b"first", *bodies]
    await bus.wait_idle()


@pytest.mark.parametrize(
    "message",
    [
        Message(b"", correlation_id="x" * 256),
        Message(b"", reply_to="\ud800"),
        Message(b"", headers={"number": 1 << 70}),
        Message(b"", headers={"text": "x" * (1 << 17)}),
        Message(b"", published_at=-1.0),
        Message(b"", published_at=float("inf")),
    ],
    ids=["long text", "half a character", "large number", "large header", "negative", "infinite"],
)
async def test_a_message_that_cannot_be_expressed_fails_alone(
    bus: RabbitBus, queue: Queue, message: Message
) -> None:
    publishes = (
        bus.publish(queue.bindings[0], each) for each in (Message(b"a"), message, Message(b"b"))
    )

    before, refused, after = await asyncio.gather(*publishes, return_exceptions=True)

    assert (before, type(refused), after) == (None, BusError, None)
    async with bus.consume(queue.name) as consumer:
        assert await take_bodies(consumer, 3) == [b"first", b"a", b"b"]
