"""Each fault of the broker and of the network, at each frame of a conversation in turn."""

import asyncio
import gc
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, get_args

import aiormq
import pytest
from pamqp.commands import Basic

from shared.bus.base import Binding, Bus, Consumer, Exchange, Message, Queue, QueueState
from shared.bus.rabbit import RabbitBus, shielded_calls
from shared.errors import (
    BusError,
    BusUnavailable,
    PublishUnconfirmed,
    QueueNotFound,
    QueueSilent,
    Unroutable,
)
from shared.telemetry import incidents
from shared.telemetry.incidents import IncidentKind, num_reported
from tests.shared.bus.deliveries import numbered, take_bodies
from tests.shared.bus.wires import DIRECT
from tests.support.deployment.broker import Broker
from tests.support.network.amqp.faults import ANSWER, FAULTS, INTERNAL_ERROR, Fault, is_ack, late
from tests.support.network.amqp.frames import Frame
from tests.support.network.amqp.provocations import CONNECTION_ENDS, Gate, Nth, NthOfEach
from tests.support.network.amqp.proxy import AmqpProxy, Conversation, leave_alone

pytestmark = [pytest.mark.rabbit, pytest.mark.usefixtures("patient_calls")]

TIMEOUT_S = 4.0
"""How long a bus waits for an answer that a fault has taken away. The broker may stand still for
seconds on a busy machine."""
DEFAULT_TIMEOUT_S = 15.0
"""How long a bus waits by default: for longer than a connection lasts that is silent."""
NO_HEARTBEAT = "heartbeat=600"
"""Of a connection that lasts although it is held up for that long."""
EXPIRES_S = 600.0
"""Longer than a test takes."""
PAUSE_S = 0.02
NUM_AT_ONCE = 16
NEVER = 1_000_000
BODIES = numbered(2)
TURNS = range(-3, 7)
"""Of the event loop, between an answer on its way and the cancellation of who waits for it."""
NUM_CUTS = 5
NUM_ENDS = 300
ENDS = {type(None), BusUnavailable, PublishUnconfirmed}
NUM_TURNS_TO_SEND = 8
"""Longer than it takes until a call is on its way to the broker."""
NUM_KEPT_CHANNELS = 2
"""A channel for publishes and a channel for calls stay open."""

SILENCES = {
    "ack lost": FAULTS["ack lost"],
    "ack too late": late(Conversation.pass_on, TIMEOUT_S * 1.2),
    "nack too late": late(Conversation.nack, TIMEOUT_S * 1.2),
    "return too late": late(Conversation.give_back, TIMEOUT_S * 1.2),
}
"""Faults after which a bus waits in vain."""
ALL_FAULTS = {**FAULTS, **SILENCES}

_Result = TypeVar("_Result")


@asynccontextmanager
async def nothing_left_behind() -> AsyncIterator[None]:
    """Wait until the tasks of the block have ended, and fail if an error in it was not handled."""
    loop = asyncio.get_running_loop()
    tasks = asyncio.all_tasks()
    complaints: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    try:
        yield
        while asyncio.all_tasks() - tasks:  # noqa: ASYNC110 - tasks end without a word
            await asyncio.sleep(PAUSE_S)
        gc.collect()
        await asyncio.sleep(0)
    finally:
        loop.set_exception_handler(None)
    assert complaints == []


def bus_of(proxy: AmqpProxy, timeout_s: float = DEFAULT_TIMEOUT_S, options: str = "") -> RabbitBus:
    return RabbitBus(f"{proxy.url}?{options}", timeout_s=timeout_s, num_confirm_channels=1)


async def persistently(bus: Bus, call: Callable[[], Awaitable[_Result]]) -> _Result:
    """Retry until it succeeds, as Warren's code does."""
    while True:
        try:
            return await call()
        except BusError:
            await asyncio.sleep(PAUSE_S)
            await bus.wait_connected()


async def stop(consumer: Consumer) -> None:
    """Stop a consumer, which raises nothing because its caller could not do anything about it."""
    try:
        await consumer.stop()
    except BusError as error:
        raise AssertionError(f"stop() has raised {error!r}") from error


async def receive(bus: Bus, queue: Queue, bodies: list[bytes]) -> None:
    """Add each body to ``bodies`` when it arrives for the first time, until all have arrived."""
    async with bus.consume(queue.name, prefetch=1) as consumer:
        async for delivery in consumer:
            if delivery.message.body not in bodies:
                bodies.append(delivery.message.body)
            await delivery.ack()
            if len(bodies) == len(BODIES):
                return await stop(consumer)
        raise BusUnavailable("the consumer has ended by itself")


async def settle(bus: Bus, queue: Queue) -> None:
    """Acknowledge redeliveries whose acknowledgement was lost, until there are none."""
    while await persistently(bus, lambda: bus.inspect(queue.name)) != QueueState(0, 0):
        with suppress(BusError, TimeoutError):
            async with bus.consume(queue.name) as consumer, asyncio.timeout(PAUSE_S):
                async for delivery in consumer:
                    assert delivery.message.body in BODIES
                    await delivery.ack()
        await bus.wait_connected()


async def converse(bus: Bus, queue: Queue) -> None:
    """All operations of a bus, each retried."""
    received: list[bytes] = []
    await bus.wait_connected()
    await persistently(bus, lambda: bus.declare(queue))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(persistently(bus, lambda: receive(bus, queue, received)))
        for message in map(Message, BODIES):
            await persistently(bus, partial(bus.publish, queue.bindings[0], message))
    await settle(bus, queue)
    await persistently(bus, lambda: bus.delete_queue(queue.name))
    assert await persistently(bus, lambda: bus.inspect(queue.name)) is None
    # In any order: a consumer whose start was not answered holds messages while the next one reads.
    assert sorted(received) == BODIES


async def make_round_trip(bus: Bus, queue: Queue) -> None:
    """The operations that succeed at the first attempt if there is no fault."""
    await bus.wait_connected()
    await bus.declare(queue)
    await bus.publish(queue.bindings[0], Message(b"fresh"))
    async with bus.consume(queue.name) as consumer:
        assert await take_bodies(consumer, 1) == [b"fresh"]
        await consumer.stop()
    assert await bus.inspect(queue.name) is not None
    await bus.delete_queue(queue.name)


async def has_at_most_channels(proxy: AmqpProxy, number: int) -> None:
    """Wait until no more than so many are open. This may take a heartbeat, 5 s, for which aiormq
    waits before it ends the connection of a channel whose reader has died of a frame that it did
    not expect."""
    while proxy.num_channels > number:  # noqa: ASYNC110 - channels end without a word
        await asyncio.sleep(PAUSE_S)


def new_queue() -> Queue:
    """A queue that expires if its test fails."""
    name = f"test.{uuid.uuid4().hex}"
    return Queue(name, (Binding(DIRECT, name),), expires_s=EXPIRES_S)


async def converse_under(
    policy: Nth, broker: Broker, timeout_s: float = DEFAULT_TIMEOUT_S
) -> str | None:
    """Have a conversation and check that the bus works as before; returns what was wrong."""
    try:
        async with AmqpProxy(broker.url, policy) as proxy, bus_of(proxy, timeout_s) as bus:
            await converse(bus, new_queue())
            proxy.policy = leave_alone
            await make_round_trip(bus, new_queue())
            await has_at_most_channels(proxy, NUM_KEPT_CHANNELS)
    except Exception as error:  # noqa: BLE001 - whatever it was, it is the result
        return f"{policy.struck}: {error!r}"
    return None


@pytest.mark.parametrize("name", ALL_FAULTS)
async def test_a_conversation_ends_as_it_should_wherever_a_fault_strikes(
    name: str, broker: Broker
) -> None:
    fault = ALL_FAULTS[name]
    timeout_s = TIMEOUT_S if name in SILENCES else DEFAULT_TIMEOUT_S
    places = asyncio.Semaphore(NUM_AT_ONCE)

    async def outcome(policy: Nth) -> str | None:
        async with places:
            return await converse_under(policy, broker, timeout_s)

    async with nothing_left_behind():
        counter = Nth(fault, NEVER)
        wrong = [await outcome(counter)]
        policies = [Nth(fault, number) for number in range(counter.num_fitted)]
        wrong += await asyncio.gather(*map(outcome, policies))
    assert [line for line in wrong if line] == []
    assert policies
    assert policies[0].struck


CHANNEL_ENDS = [f"{code} closes channel" for code in (403, 404, 406, 541)]
PLACES: dict[str, Callable[[Conversation, Frame], bool]] = {
    "confirmation": is_ack,
    "delivery": lambda _, frame: frame.name == Basic.Deliver.name,
}
ANSWERS = ("Queue.DeclareOk", "Basic.QosOk", "Basic.ConsumeOk", "Queue.DeleteOk")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, "channel") for name in CHANNEL_ENDS]
    + [(name, "connection") for name in CONNECTION_ENDS],
)
async def test_an_end_of_a_channel_or_connection_is_reported_once(
    name: str, kind: IncidentKind, place: str, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    await is_reported_once(replace(FAULTS[name], fits=PLACES[place]), kind, broker, caplog)


@pytest.mark.parametrize("answer", ANSWERS)
async def test_an_end_of_a_channel_instead_of_an_answer_is_reported_once(
    answer: str, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    fault = replace(INTERNAL_ERROR, fits=lambda _, frame: frame.name == answer)

    await is_reported_once(fault, "channel", broker, caplog)


async def is_reported_once(
    fault: Fault, kind: IncidentKind, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    """Have a conversation in which a fault strikes once, and read its trace."""
    policy = Nth(fault, 0)
    num_before = {kind: num_reported(kind) for kind in get_args(IncidentKind)}

    assert await converse_under(policy, broker) is None

    assert policy.struck
    num_more = {kind: num_reported(kind) - num for kind, num in num_before.items()}
    assert {kind: num for kind, num in num_more.items() if num} == {kind: 1}
    (line,) = [record for record in caplog.records if hasattr(record, "incident")]
    assert vars(line)["incident"] == kind
    assert line.exc_info is not None
    assert isinstance(line.exc_info[1], Exception)


async def cancel_around(
    task: "asyncio.Task[Any]", gate: Gate, num_turns: int, num_times: int = 1
) -> None:
    """Cancel a task up to ``num_times``, this many iterations of the event loop after its answer is
    released. If ``num_turns`` is negative, release the answer after the cancellation."""
    if num_turns >= 0:
        gate.open()
        await turns(num_turns)
    was_cancelled = task.cancel()
    for _ in range(num_times - 1):
        await turns(1)
        task.cancel()
    if num_turns < 0:
        await turns(-num_turns - 1)
        gate.open()
    await asyncio.wait([task])
    assert task.cancelled() or not was_cancelled


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def publish_and_cancel(fault: Fault, num_turns: int, broker: Broker) -> BusError | None:
    """Cancel a publish when its answer arrives; returns the result of another publish on the same
    channel."""
    queue, gate = new_queue(), Gate(fault)
    async with AmqpProxy(broker.url, gate) as proxy, bus_of(proxy) as bus:
        await bus.declare(queue)
        victim = asyncio.create_task(bus.publish(queue.bindings[0], Message(b"victim")))
        await gate.wait_struck()
        bystander = asyncio.create_task(bus.publish(queue.bindings[0], Message(b"bystander")))
        await turns(NUM_TURNS_TO_SEND)
        await cancel_around(victim, gate, num_turns)
        await asyncio.wait([bystander])
        await make_round_trip(bus, new_queue())
        await has_at_most_channels(proxy, NUM_KEPT_CHANNELS)
        error = bystander.exception()
        assert error is None or isinstance(error, BusError), repr(error)
        return error


@pytest.mark.parametrize("name", ["ack twice", "nack", "return"])
async def test_a_publish_cancelled_when_its_answer_comes_takes_no_other_with_it(
    name: str, broker: Broker
) -> None:
    async with nothing_left_behind():
        errors = await asyncio.gather(
            *(publish_and_cancel(FAULTS[name], num_turns, broker) for num_turns in TURNS)
        )

    assert set(errors) == {None}


@pytest.mark.parametrize(
    "name", ["404 closes channel", "541 closes channel", "connection cut inside of a frame"]
)
async def test_a_publish_cancelled_when_its_channel_ends_leaves_nothing_behind(
    name: str, broker: Broker
) -> None:
    fault = replace(FAULTS[name], fits=FAULTS["ack twice"].fits)
    async with nothing_left_behind():
        errors = await asyncio.gather(
            *(publish_and_cancel(fault, num_turns, broker) for num_turns in TURNS)
        )

    assert all(isinstance(error, BusUnavailable) for error in errors)


async def test_publishes_end_with_their_connection_however_many_wait_for_it(
    broker: Broker,
) -> None:
    queue = new_queue()
    async with (
        nothing_left_behind(),
        AmqpProxy(broker.url) as proxy,
        # Heartbeats would count as frames, and the connection for calls would break as well.
        bus_of(proxy, options=NO_HEARTBEAT) as bus,
    ):
        proxy.policy = NthOfEach(FAULTS["frame with a wrong end"], NUM_AT_ONCE)
        for _ in range(NUM_CUTS):
            await bus.declare(queue)
            publishes = []
            while bus.is_connected:
                publishes += [
                    asyncio.create_task(bus.publish(queue.bindings[0], Message(b"one of many")))
                    for _ in range(NUM_AT_ONCE)
                ]
                await asyncio.sleep(0.001)
            await asyncio.wait(publishes)
            assert {type(publish.exception()) for publish in publishes} <= ENDS
            await bus.wait_connected()
        await bus.wait_idle()


async def test_each_end_of_a_channel_is_confirmed_however_many_end_at_once(broker: Broker) -> None:
    """The broker would take the number of an unconfirmed end for a channel that is open."""

    async def miss() -> None:
        with pytest.raises(QueueNotFound):
            await consume_once(bus, new_queue())

    async with (
        nothing_left_behind(),
        AmqpProxy(broker.url) as proxy,
        # That many calls take a busy machine longer than a connection may be silent.
        bus_of(proxy, 600, NO_HEARTBEAT) as bus,
    ):
        await make_round_trip(bus, new_queue())
        await asyncio.gather(*(miss() for _ in range(NUM_ENDS)))
        await has_at_most_channels(proxy, NUM_KEPT_CHANNELS)


async def consume_once(bus: Bus, queue: Queue) -> None:
    async with bus.consume(queue.name, prefetch=1):
        pass


CALLS: dict[str, Callable[[Bus, Queue, Consumer], Coroutine[Any, Any, object]]] = {
    "declare": lambda bus, queue, _: bus.declare(queue),
    "consume": lambda bus, queue, _: consume_once(bus, queue),
    "inspect": lambda bus, queue, _: bus.inspect(queue.name),
    "delete": lambda bus, queue, _: bus.delete_queue(queue.name),
    "stop": lambda _bus, _queue, consumer: consumer.stop(),
}


@pytest.mark.parametrize("num_times", [1, 2])
@pytest.mark.parametrize("name", CALLS)
async def test_a_call_cancelled_when_an_answer_comes_leaves_nothing_behind(
    name: str, num_times: int, broker: Broker
) -> None:
    queue = new_queue()

    async def answer(number: int, num_turns: int) -> int:
        """Cancel the call around an answer; returns the number of its answers."""
        gate = Gate(ANSWER, number)
        await bus.declare(queue)
        async with bus.consume(queue.name) as consumer:
            proxy.policy = gate
            call = asyncio.create_task(CALLS[name](bus, queue, consumer))
            struck = asyncio.create_task(gate.wait_struck())
            await asyncio.wait([call, struck], return_when=asyncio.FIRST_COMPLETED)
            if struck.done():
                await cancel_around(call, gate, num_turns, num_times)
            struck.cancel()
            proxy.policy = leave_alone
        return gate.num_fitted

    async with nothing_left_behind(), AmqpProxy(broker.url) as proxy, bus_of(proxy) as bus:
        await make_round_trip(bus, new_queue())
        for number in range(await answer(NEVER, 0)):
            for num_turns in TURNS[::num_times]:
                await answer(number, num_turns)
                await asyncio.sleep(PAUSE_S)
                await make_round_trip(bus, new_queue())
                await has_at_most_channels(proxy, NUM_KEPT_CHANNELS)


@pytest.mark.parametrize("name", CALLS)
async def test_a_call_whose_answer_comes_too_late_leaves_nothing_behind(
    name: str, broker: Broker
) -> None:
    """Neither its channel nor its connection ends, and nothing of it stays open."""
    num_reported = incidents.num_reported("connection")

    async def answer_late(number: int) -> int:
        """Hold an answer until the caller has gone; returns how many answers it has had."""
        queue, gate = new_queue(), Gate(ANSWER, number)
        async with (
            AmqpProxy(broker.url) as proxy,
            bus_of(proxy, TIMEOUT_S, NO_HEARTBEAT) as bus,
        ):
            await make_round_trip(bus, new_queue())
            await bus.declare(queue)
            async with bus.consume(queue.name) as consumer:
                proxy.policy = gate
                with suppress(BusUnavailable):
                    await CALLS[name](bus, queue, consumer)
                await asyncio.sleep(PAUSE_S)
                if gate.has_struck:
                    gate.open()
                proxy.policy = leave_alone
            await has_at_most_channels(proxy, NUM_KEPT_CHANNELS)
            await make_round_trip(bus, new_queue())
        return gate.num_fitted

    async with nothing_left_behind():
        num_answers = await answer_late(NEVER)
        await asyncio.gather(*map(answer_late, range(num_answers)))

    assert num_answers
    assert incidents.num_reported("connection") == num_reported


async def use_until_deleted(bus: Bus, queue: Queue, is_empty: asyncio.Event) -> None:
    """Sets ``is_empty`` after the last message. Raises `QueueNotFound` if the queue no longer
    exists."""
    async with bus.consume(queue.name, prefetch=1) as consumer:
        for message in map(Message, BODIES):
            with suppress(Unroutable):
                await bus.publish(queue.bindings[0], message)
        async for delivery in consumer:
            await delivery.ack()
            if delivery.message.body == BODIES[-1]:
                is_empty.set()


async def test_a_queue_that_is_deleted_at_any_moment_is_missed_and_can_be_declared_again(
    broker: Broker, rabbit_bus: RabbitBus
) -> None:
    async def delete_at(number: int) -> bool:
        """Delete the queue before the bus receives the broker's answer with this number; returns
        whether there were that many."""
        queue, gate, is_empty = new_queue(), Gate(ANSWER, number), asyncio.Event()
        await bus.declare(queue)
        proxy.policy = gate
        using = asyncio.create_task(use_until_deleted(bus, queue, is_empty))
        ends = [asyncio.create_task(end) for end in (gate.wait_struck(), is_empty.wait())]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        await rabbit_bus.delete_queue(queue.name)
        if gate.has_struck:
            gate.open()
        proxy.policy = leave_alone
        with pytest.raises(QueueNotFound):
            await using
        await converse(bus, queue)
        return gate.has_struck

    await make_round_trip(rabbit_bus, new_queue())
    async with nothing_left_behind(), AmqpProxy(broker.url) as proxy, bus_of(proxy) as bus:
        await make_round_trip(bus, new_queue())
        number = 0
        while await delete_at(number):
            number += 1
        await make_round_trip(bus, new_queue())
        await has_at_most_channels(proxy, NUM_KEPT_CHANNELS)

    assert number > len(BODIES)


async def test_a_deletion_without_an_answer_is_given_up_while_others_are_answered(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shielded_calls, "_QUIET_S", 0.05)
    lost = Fault(lambda _, frame: frame.name == "Queue.DeleteOk", lambda _, __: None)
    queue = new_queue()
    # The end of the bus waits for the answer, too.
    async with AmqpProxy(broker.url, Nth(lost, 0)) as proxy, bus_of(proxy, TIMEOUT_S) as bus:
        await bus.wait_connected()
        await bus.declare(queue)

        with pytest.raises(QueueSilent):
            await bus.delete_queue(queue.name)


async def test_an_exchange_that_was_deleted_is_declared_again(
    broker: Broker, rabbit_bus: RabbitBus
) -> None:
    exchange = Exchange(f"warren.test.{uuid.uuid4().hex}", "direct")
    queue = replace(new_queue(), bindings=(Binding(exchange, "key"),))
    await rabbit_bus.declare(queue)
    connection = await aiormq.connect(broker.url)
    channel = await connection.channel()
    await channel.exchange_delete(exchange.name)

    with pytest.raises(Unroutable):
        await rabbit_bus.publish(queue.bindings[0], Message(b"nowhere"))
    with suppress(QueueNotFound):
        await rabbit_bus.declare(queue)  # it has seen the exchange
    await rabbit_bus.declare(queue)
    await rabbit_bus.publish(queue.bindings[0], Message(b"again"))

    await rabbit_bus.delete_queue(queue.name)
    await channel.exchange_delete(exchange.name)
    await connection.close()
