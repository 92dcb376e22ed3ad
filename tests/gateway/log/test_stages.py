"""The stages of a reading, in random schedules of a broker that fails in every way that it can."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import product
from pathlib import Path
from random import Random

import pytest

from gateway.log import reading as reading_module
from gateway.log.buffer import RelayBuffer
from gateway.log.cursor import LogCursor, LogFacts, Restarted
from gateway.log.reading import LogReading
from gateway.log.reply_queues import ReplyLog
from gateway.log.stages import TRANSITIONS, ImpossibleTransition, Stage, Transition, after
from shared import topology
from shared.bus import subscribe
from shared.bus.base import Binding, Exchange, Message, Queue
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.bus.memory_queue import MemoryConsumer
from shared.errors import (
    BusError,
    BusUnavailable,
    LogLost,
    NoFreeChannel,
    PublishRefused,
    QueueBusy,
    QueueDown,
    QueueNotFound,
    QueueSilent,
    StreamExpired,
    Unroutable,
)
from shared.log import LogWriter
from shared.messages import (
    Continue,
    Failed,
    Release,
    ReplyEvent,
    Started,
    TokenDelta,
    decode_command,
    encode,
)

NUM_SCHEDULES = 800
WORKER = "worker.w"
CONTEXT = LogFacts().encode()
PAGE = Path(__file__).parents[3] / "docs" / "concepts" / "log.md"
CONSUMING: Sequence[type[BusError]] = (
    BusUnavailable,
    NoFreeChannel,
    QueueBusy,
    QueueDown,
    QueueNotFound,
    QueueSilent,
)
DECLARING: Sequence[type[BusError]] = (BusUnavailable, QueueDown, QueueNotFound, QueueSilent)
PUBLISHING: Sequence[type[BusError]] = (BusUnavailable, PublishRefused, Unroutable)


class FaultyBus(MemoryBus):
    """The connection of a reading, whose calls and consumers fail at random."""

    def __init__(self, broker: MemoryBroker, random: Random) -> None:
        super().__init__(broker)
        self.worker = ScriptedRuns(MemoryBus(broker), random)
        self._random = random
        self._share = random.choice([0.02, 0.1, 0.3, 0.5])

    def _draw(self, errors: Sequence[type[BusError]]) -> BusError | None:
        if self._random.random() >= self._share:
            return None
        return self._random.choice(errors)("a fault")

    def _fail(self, errors: Sequence[type[BusError]]) -> None:
        error = self._draw(errors)
        if error is not None:
            raise error

    async def declare(self, *resources: Exchange | Queue) -> None:
        self._fail(DECLARING)
        await super().declare(*resources)
        if self._random.random() < 0.5:  # a worker may find the log before its copy is there
            await self.worker.start(self.worker.log_name)

    async def publish(self, binding: Binding, message: Message) -> None:
        self._fail(PUBLISHING)
        if binding == topology.worker_binding(WORKER):
            self.worker.obey(message)
        else:
            await super().publish(binding, message)

    @asynccontextmanager
    async def consume(
        self, queue: str, *, prefetch: int = 0, is_exclusive: bool = False
    ) -> AsyncIterator[MemoryConsumer]:
        self._fail(CONSUMING)
        async with super().consume(queue, prefetch=prefetch, is_exclusive=is_exclusive) as consumer:
            error = self._draw(CONSUMING)
            if error is not None:
                asyncio.get_running_loop().call_soon(consumer.close, error)
            yield consumer


class ScriptedRuns:
    """Writes token 0, 1, 2 and so on, in a run for each queue in which the log is."""

    def __init__(self, bus: MemoryBus, random: Random) -> None:
        self.log_name = ""
        self._bus = bus
        self._random = random
        self._num_runs = 0
        self._writer: LogWriter | None = None

    async def start(self, log_name: str, *, is_first: bool = False) -> None:
        """Begin a run in a queue of the log."""
        self.log_name, self._writer = log_name, LogWriter(1, 1) if is_first else None
        self._num_runs += 1
        await self._publish(
            Started(
                worker=WORKER,
                ticket=str(self._num_runs),
                num_prompt_tokens=(1,),
                context=CONTEXT,
                num_returns=self._num_runs,
                is_waiting=not is_first,
            )
        )

    def obey(self, message: Message) -> None:
        command = decode_command(message.body)
        if isinstance(command, Continue) and command.ticket == str(self._num_runs):
            self._writer = LogWriter.resume(command)

    async def go_on(self, log_name: str) -> None:
        """Write the next event, or begin a run in the queue in which the log now is."""
        if log_name != self.log_name:
            return await self.start(log_name)
        if self._writer is None:
            return None
        if self._random.random() < 0.02:
            return await self._publish(self._writer.fail("internal_error", "a fault"))
        token_id = len(self._writer.chains[0].token_ids)
        return await self._publish(self._writer.delta(0, [token_id], f"{token_id} "))

    async def _publish(self, event: ReplyEvent) -> None:
        async with self._bus as bus:
            with suppress(BusError):
                await bus.publish(topology.reply_binding(self.log_name), Message(encode(event)))


class ScriptedClient:
    """Takes what a reading has put into its buffer."""

    def __init__(self, buffer: RelayBuffer) -> None:
        self.text = ""
        self.has_failed = False
        self._buffer = buffer

    async def take(self) -> None:
        if not len(self._buffer):
            return
        for item in await self._buffer.take():
            if isinstance(item, Restarted):
                self.text, self.has_failed = "", False
            elif isinstance(item, TokenDelta):
                assert not self.has_failed, "a token after the end"
                self.text += item.text
            else:
                self.has_failed = isinstance(item, Failed)


async def run_schedule(seed: int) -> int:
    """Read a log through faults; returns the number of tokens that were read.

    Fails if a token is lost, repeated or changed, or if the reading comes to an error that it does
    not declare.
    """
    random, broker = Random(seed), MemoryBroker()
    async with MemoryBus(broker) as plain, FaultyBus(broker, random) as bus:
        await plain.declare(topology.REPLIES, topology.CONTROL)
        log = ReplyLog(bus, "r", retention_s=60)
        await plain.declare(log.queue)
        facts = LogFacts() if random.random() < 0.5 else None
        buffer = RelayBuffer()
        reading = LogReading(bus, log, LogCursor(Release(request_id="r"), facts), buffer)
        client = ScriptedClient(buffer)
        await bus.worker.start(log.queue.name, is_first=True)
        running = asyncio.create_task(reading.run())
        for _ in range(60):
            if random.random() < 0.2:
                await client.take()
            else:
                await bus.worker.go_on(log.queue.name)
            for _ in range(random.randrange(4)):
                await asyncio.sleep(0)
        await client.take()
        running.cancel()
        with suppress(asyncio.CancelledError, LogLost, StreamExpired):
            await running
        await reading.close()
    num_tokens = client.text.count(" ")
    assert client.text == "".join(f"{k} " for k in range(num_tokens))
    return num_tokens


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> set[tuple[Stage, Transition]]:
    """The transitions of readings that never wait for long, and read few events ahead."""
    monkeypatch.setattr(subscribe, "_RETRY_PAUSE_S", 0.0)
    monkeypatch.setattr(reading_module, "_DOWN_PAUSE_S", 0.0)
    monkeypatch.setattr(reading_module, "_MAX_AHEAD", 4)
    found: set[tuple[Stage, Transition]] = set()

    def recorded(stage: Stage, transition: Transition) -> Stage:
        following = after(stage, transition)
        found.add((stage, transition))
        return following

    monkeypatch.setattr(reading_module, "after", recorded)
    return found


async def test_readings_pass_through_every_transition_and_lose_nothing(
    seen: set[tuple[Stage, Transition]],
) -> None:
    num_tokens = 0
    for seed in range(NUM_SCHEDULES):
        try:
            num_tokens += await run_schedule(seed)
        except (AssertionError, ImpossibleTransition) as error:
            raise AssertionError(f"schedule {seed}") from error

    assert seen == {
        (stage, transition) for transition, stages in TRANSITIONS.items() for stage in stages
    }
    assert num_tokens > 5 * NUM_SCHEDULES


@pytest.mark.parametrize(("stage", "transition"), [*product(Stage, Transition)])
def test_a_transition_that_is_not_in_the_table_is_impossible(
    stage: Stage, transition: Transition
) -> None:
    if stage in TRANSITIONS[transition]:
        assert after(stage, transition) in Stage
    else:
        with pytest.raises(ImpossibleTransition, match=f"{transition.name} while {stage.label}"):
            after(stage, transition)


def test_the_diagram_has_every_stage() -> None:
    section = PAGE.read_text().partition("## The stages of a reader")[2]
    diagram = section.split("```")[1]

    assert [stage.label for stage in Stage if stage.label not in diagram] == []
