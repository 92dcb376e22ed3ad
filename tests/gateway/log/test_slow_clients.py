"""A log whose client takes less than there is."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest

from gateway.log.cursor import LogFacts, Restarted
from gateway.log.relay import LogRelay
from gateway.log.reply_queues import ReplyLog
from shared import topology
from shared.bus.base import Binding, Message
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.bus.memory_queue import MemoryConsumer
from shared.errors import DeadlineExceeded, ShuttingDown, WarrenError
from shared.log import LogWriter
from shared.messages import (
    Accepted,
    Failed,
    Finished,
    Release,
    ReplyEvent,
    Started,
    TokenDelta,
    decode_event,
    encode,
)
from tests.support.gateway.http import eventually

FACTS = LogFacts()


async def write_log(bus: MemoryBus, log: ReplyLog, num_tokens: int) -> None:
    writer = LogWriter(1, 1)
    start = Started(worker="worker.w", ticket="t", num_prompt_tokens=(1,), context=FACTS.encode())
    events: list[ReplyEvent] = [start]
    events += [writer.delta(0, [k], "word ") for k in range(num_tokens)]
    events.append(writer.finish(0, [], "", "stop"))
    for event in events:
        await bus.publish(log.queue.bindings[0], Message(encode(event)))


@asynccontextmanager
async def relaying(
    bus: MemoryBus, num_tokens: int, facts: LogFacts | None = FACTS
) -> AsyncIterator[LogRelay]:
    """A relay of a log of so many tokens, from which nothing has been taken; without a ``facts``
    it is another gateway's log."""
    await bus.declare(topology.REPLIES)
    log = ReplyLog(bus, "r", retention_s=60)
    await log.declare()
    await write_log(bus, log, num_tokens)
    relay = LogRelay(bus, log, Release(request_id="r", reader="g"), facts)
    relay.start()
    try:
        yield relay
    finally:
        await relay.stop()


async def take_all(relay: LogRelay) -> int:
    """Returns how many events there were."""
    num_events = 0
    while not relay.is_ended:
        num_events += len(await relay.take(timeout_s=5))
        await asyncio.sleep(0.001)
    return num_events


def counted(function: Callable[..., ReplyEvent], calls: list[None]) -> Callable[..., ReplyEvent]:
    def call(*args: object) -> ReplyEvent:
        calls.append(None)
        return function(*args)

    return call


async def test_the_cost_of_a_log_grows_with_its_length_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[None] = []
    monkeypatch.setattr("gateway.log.reading.decode_event", counted(decode_event, calls))

    async with MemoryBus() as bus, relaying(bus, 8_000) as relay:
        num_events = await take_all(relay)

    assert num_events == len(calls) == 8_002


async def test_a_log_that_waits_for_its_client_is_not_lost_with_a_connection() -> None:
    broker = MemoryBroker()
    async with (
        MemoryBus(broker) as observer,
        MemoryBus(broker) as bus,
        relaying(bus, 1_000) as relay,
    ):

        async def is_held() -> bool:
            state = await observer.inspect(relay.log_name)
            return state is not None and state.num_consumers == 1

        await eventually(is_held)
        await asyncio.sleep(0.1)
        bus.sever()
        await eventually(is_held)

        assert await take_all(relay) == 1_002


async def test_a_log_that_is_written_again_is_taken_again_whole() -> None:
    broker, facts = MemoryBroker(), msgspec.structs.replace(FACTS, num_choices=2)
    async with (
        MemoryBus(broker) as writer,
        MemoryBus(broker) as bus,
        relaying(bus, 0, facts) as relay,
    ):
        num_events = 0
        while num_events < 2:
            num_events += len(await relay.take(timeout_s=5))
        bus.sever()
        async with writer.consume(relay.log_name, is_exclusive=True) as forgotten:
            started, finished = [await anext(forgotten) for _ in range(2)]
            await started.ack()
            await finished.ack()
        other = Message(encode(LogWriter(1, 2).finish(1, [], "", "stop")))
        for message in (started.message, other, finished.message):
            await writer.publish(Binding(topology.REPLIES, relay.log_name), message)

        restarted, *events = await relay.take()
        while not relay.is_ended:
            events += await relay.take()

    assert isinstance(restarted, Restarted)
    assert [type(event) for event in events] == [Started, Finished, Finished]


async def test_an_error_that_was_read_is_not_lost_with_the_logs_node() -> None:
    broker = MemoryBroker()
    async with MemoryBus(broker) as bus:
        await bus.declare(topology.REPLIES)
        log = ReplyLog(bus, "r", retention_s=60)
        await log.declare()
        writer = LogWriter(1, 1)
        start = Started(worker="worker.w", ticket="t", num_prompt_tokens=(1,))
        for event in (start, writer.delta(0, [1], "a"), writer.fail("internal_error", "broken")):
            await bus.publish(log.queue.bindings[0], Message(encode(event)))
        relay = LogRelay(bus, log, Release(request_id="r", reader="g"), FACTS)
        relay.start()

        async def has_ended() -> bool:
            return relay.has_ended

        await eventually(has_ended)
        broker.take_down(log.queue.name)
        await asyncio.sleep(0.1)
        events = await relay.take(timeout_s=5)
        await relay.stop()

    assert [type(event) for event in events] == [Started, TokenDelta, Failed]
    assert relay.is_ended


class DeafBus(MemoryBus):
    """Delivers nothing."""

    @asynccontextmanager
    async def consume(
        self, queue: str, *, prefetch: int = 0, is_exclusive: bool = False
    ) -> AsyncIterator[MemoryConsumer]:
        await asyncio.Event().wait()
        async with super().consume(queue, prefetch=prefetch, is_exclusive=is_exclusive) as consumer:
            yield consumer


@pytest.mark.parametrize(
    ("timeout_s", "error"), [(0.05, DeadlineExceeded), (math.inf, ShuttingDown)]
)
async def test_an_accepted_request_waits_for_its_log_until_its_deadline(
    timeout_s: float, error: type[WarrenError]
) -> None:
    async with DeafBus() as bus:
        await bus.declare(topology.REPLIES)
        log = ReplyLog(bus, "r", retention_s=60)
        await log.declare()
        loop = asyncio.get_running_loop()
        claim = Release(request_id="r", reader="g", body_hash="h")
        relay = LogRelay(bus, log, claim, None, loop.time() + timeout_s)
        relay.start()
        if error is ShuttingDown:
            loop.call_later(0.1, relay.fail, ShuttingDown("The gateway shuts down."))

        with pytest.raises(error):
            await relay.catch_up(Accepted(body_hash="h"))
        await relay.stop()


async def test_a_log_is_read_though_no_gateway_hears_who_asks_for_it() -> None:
    """When all gateways have just lost the broker, not even the reader's own gateway hears it."""
    async with MemoryBus() as bus:
        await bus.declare(topology.CONTROL)
        async with relaying(bus, num_tokens=3, facts=None) as relay:
            assert await take_all(relay) == 5
