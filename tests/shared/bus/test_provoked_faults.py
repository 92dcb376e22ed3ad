"""Each fault of the broker and of the network, at each frame of a conversation in turn."""

import asyncio
import gc
import itertools
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import pytest

from shared.bus.base import Binding, Bus, Message, Queue, QueueState
from shared.bus.rabbit import RabbitBus
from shared.errors import BusError
from tests.shared.bus.deliveries import numbered, take_bodies
from tests.shared.bus.wires import DIRECT
from tests.support.amqp_proxy import AmqpProxy, Conversation, Policy
from tests.support.broker import Broker
from tests.support.provocations import FAULTS, Nth, late

pytestmark = pytest.mark.rabbit

TIMEOUT_S = 2.0
"""How long a bus waits for the broker."""
PATIENCE_S = 30.0
"""How long a conversation may take whatever happens: an outage and a few timeouts."""
PAUSE_S = 0.02
NUM_AT_ONCE = 16
BODIES = numbered(3)
NUM_KEPT_CHANNELS = 2
"""One for publishes and one for calls stay open."""

ALL_FAULTS = {
    **FAULTS,
    "ack too late": late(Conversation.pass_on, TIMEOUT_S * 1.2),
    "nack too late": late(Conversation.nack, TIMEOUT_S * 1.2),
    "return too late": late(Conversation.give_back, TIMEOUT_S * 1.2),
}

_Result = TypeVar("_Result")


@asynccontextmanager
async def nothing_left_behind() -> AsyncIterator[None]:
    """Fail where a task outlives the block, or where an error inside of it reached nobody."""
    loop = asyncio.get_running_loop()
    tasks = asyncio.all_tasks()
    complaints: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    try:
        yield
        with suppress(TimeoutError):
            async with asyncio.timeout(TIMEOUT_S * 5):
                while asyncio.all_tasks() > tasks:  # noqa: ASYNC110 - tasks end without a word
                    await asyncio.sleep(PAUSE_S)
        left = asyncio.all_tasks() - tasks
        gc.collect()
        await asyncio.sleep(0)
    finally:
        loop.set_exception_handler(None)
    assert (left, complaints) == (set(), [])


@asynccontextmanager
async def bus_through(broker: Broker, policy: Policy) -> AsyncIterator[tuple[RabbitBus, AmqpProxy]]:
    async with (
        AmqpProxy(broker.url, policy) as proxy,
        RabbitBus(proxy.url, timeout_s=TIMEOUT_S, num_confirm_channels=1) as bus,
    ):
        yield bus, proxy


async def persistently(bus: Bus, call: Callable[[], Awaitable[_Result]]) -> _Result:
    """Try again until it is done, as all of Warren's code does."""
    while True:
        try:
            return await call()
        except BusError:
            await asyncio.sleep(PAUSE_S)
            await bus.wait_connected()


async def receive(bus: Bus, queue: Queue, bodies: list[bytes]) -> None:
    """Add bodies to ``bodies`` as they come for the first time, until all are there."""
    async with bus.consume(queue.name, prefetch=2) as consumer:
        async for delivery in consumer:
            if delivery.message.body not in bodies:
                bodies.append(delivery.message.body)
            await delivery.ack()
            if len(bodies) == len(BODIES):
                break
        await consumer.stop()


async def settle(bus: Bus, queue: Queue) -> None:
    """Acknowledge what comes again because its acknowledgement was lost, until nothing is left."""
    while await persistently(bus, lambda: bus.inspect(queue.name)) != QueueState(0, 0):
        with suppress(BusError, TimeoutError):
            async with bus.consume(queue.name) as consumer, asyncio.timeout(PAUSE_S):
                async for delivery in consumer:
                    assert delivery.message.body in BODIES
                    await delivery.ack()
        await bus.wait_connected()


async def converse(bus: Bus, queue: Queue) -> None:
    """All that a bus can do, through whatever happens."""
    received: list[bytes] = []
    await bus.wait_connected()
    await persistently(bus, lambda: bus.declare(queue))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(persistently(bus, lambda: receive(bus, queue, received)))
        for body in BODIES:
            message = Message(body)
            await persistently(bus, lambda m=message: bus.publish(queue.bindings[0], m))
    await settle(bus, queue)
    await persistently(bus, lambda: bus.delete_queue(queue.name))
    assert await persistently(bus, lambda: bus.inspect(queue.name)) is None
    assert received == BODIES


async def make_round_trip(bus: Bus, queue: Queue) -> None:
    """What works on the first try when nothing happens."""
    await bus.wait_connected()
    await bus.declare(queue)
    await bus.publish(queue.bindings[0], Message(b"fresh"))
    async with bus.consume(queue.name) as consumer:
        assert await take_bodies(consumer, 1) == [b"fresh"]
        await consumer.stop()
    assert await bus.inspect(queue.name) is not None
    await bus.delete_queue(queue.name)


async def has_channels(proxy: AmqpProxy, number: int) -> None:
    """Wait until so many are open and no more."""
    with suppress(TimeoutError):
        async with asyncio.timeout(TIMEOUT_S * 2):
            while proxy.num_channels != number:  # noqa: ASYNC110 - channels end without a word
                await asyncio.sleep(PAUSE_S)
    assert proxy.num_channels == number


def new_queue() -> Queue:
    """One that goes by itself where its test fails."""
    name = f"test.{uuid.uuid4().hex}"
    return Queue(name, (Binding(DIRECT, name),), expires_s=PATIENCE_S)


async def converse_under(policy: Nth, broker: Broker) -> str | None:
    """Have a conversation, and see whether the bus is as good as new after it; returns what was
    wrong."""
    try:
        async with asyncio.timeout(PATIENCE_S), bus_through(broker, policy) as (bus, proxy):
            await converse(bus, new_queue())
            policy.is_armed = False
            await make_round_trip(bus, new_queue())
            await has_channels(proxy, NUM_KEPT_CHANNELS)
    except Exception as error:  # noqa: BLE001 - whatever it was, it is the result
        return f"{policy.struck}: {error!r}"
    return None


@pytest.mark.parametrize("name", ALL_FAULTS)
async def test_a_conversation_ends_as_it_should_wherever_a_fault_strikes(
    name: str, broker: Broker
) -> None:
    wrong: list[str | None] = []
    async with nothing_left_behind():
        for first in itertools.count(0, NUM_AT_ONCE):
            numbers = range(first, first + NUM_AT_ONCE)
            policies = [Nth(ALL_FAULTS[name], number) for number in numbers]
            wrong += await asyncio.gather(*(converse_under(policy, broker) for policy in policies))
            if not policies[-1].struck:
                break
    assert [line for line in wrong if line] == []
    assert first or policies[0].struck
