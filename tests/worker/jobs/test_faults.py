"""A worker when things go wrong around it: it answers, or it says why not, and lives on."""

import asyncio
import time
from contextlib import suppress

import msgspec
import pytest

from shared import messages, topology
from shared.bus.base import Binding, Message, Queue
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.errors import BusUnavailable, PublishRefused, PublishUnconfirmed, Unroutable
from shared.messages import (
    Cancel,
    Completed,
    Failed,
    Finished,
    SamplingParams,
    Started,
)
from tests.support.deployment.processes import free_port
from tests.support.engines.brake import Brake
from tests.support.workers.jobs import ask, new_job, publish, read, reading
from tests.support.workers.synthetic import echo_worker
from worker.jobs import consumer as consumer_module
from worker.jobs import delivery
from worker.process import health_server

SHORT = SamplingParams(max_tokens=30, ignore_eos=True)
LONG = SamplingParams(max_tokens=2000, ignore_eos=True)


class LossyBus(MemoryBus):
    """Loses the confirmation of the first `Started`, or with it the connection."""

    def __init__(self, broker: MemoryBroker, *, is_connection_lost: bool) -> None:
        super().__init__(broker)
        self._is_connection_lost = is_connection_lost
        self._is_harmless = False

    async def publish(self, binding: Binding, message: Message) -> None:
        if self._is_harmless or not is_started(binding, message):
            return await super().publish(binding, message)
        self._is_harmless = True
        if self._is_connection_lost:
            self.sever()
            await asyncio.sleep(0.01)
            raise BusUnavailable("the connection was lost")
        await super().publish(binding, message)
        raise PublishUnconfirmed("no confirmation in time")


def is_started(binding: Binding, message: Message) -> bool:
    if binding.exchange != topology.REPLIES:
        return False
    return isinstance(messages.decode_event(message.body), Started)


@pytest.mark.parametrize("is_connection_lost", [False, True])
async def test_a_started_of_unknown_fate_opens_one_attempt(
    is_connection_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer_module, "_ADOPTION_S", 60.0)  # its delivery comes back, if late
    job = new_job("echo", sampling=SHORT)
    broker = MemoryBroker()
    async with (
        MemoryBus(broker) as bus,
        LossyBus(broker, is_connection_lost=is_connection_lost) as lossy,
        echo_worker(lossy, step_s=0.005),
        reading(bus, job) as reader,
    ):
        await publish(bus, job)
        log = await read(bus, job, reader)

    assert len(log.token_ids) == 30
    assert log.reader.attempt == 1


class UnboundBus(MemoryBus):
    """The binding of a log is missing for a while, as when the log has just returned with its
    node."""

    bound_at = 0.0

    async def publish(self, binding: Binding, message: Message) -> None:
        if binding.exchange == topology.REPLIES and time.monotonic() < self.bound_at:
            raise Unroutable("no binding yet")
        await super().publish(binding, message)


@pytest.mark.parametrize("patience_s", [0.2, 30.0])
async def test_a_log_that_is_not_bound_yet_loses_no_job(
    patience_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "_DOWN_PATIENCE_S", patience_s)
    job = new_job("echo", sampling=SHORT)
    broker = MemoryBroker()
    async with (
        MemoryBus(broker) as bus,
        UnboundBus(broker) as unbound,
        echo_worker(unbound, step_s=0.005),
        reading(bus, job) as consumer,
    ):
        await publish(bus, job)
        log = await read(bus, job, consumer, num_tokens=1)
        unbound.bound_at = time.monotonic() + 1
        log = await read(bus, job, consumer, log)

    assert len(log.token_ids) == 30
    assert isinstance(log.last, Finished)


async def test_a_reply_queue_that_its_publisher_did_not_bind_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delivery, "_RETRY_PAUSE_S", 0.01)
    jobs = topology.jobs_queue("echo", "interactive")
    job = msgspec.structs.replace(new_job("echo"), request_id="alice.1")
    async with MemoryBus() as bus, asyncio.timeout(25):  # it would be waited for for 30 s
        await bus.declare(topology.REPLIES, jobs, Queue("reply.alice.1"))
        await publish(bus, job)
        async with bus.consume(jobs.name) as consumer:
            publisher = delivery.ReplyPublisher(bus, await anext(consumer), job.request_id)
        with pytest.raises(Unroutable):
            await publisher.publish(Failed(code="invalid_request", message="x"))


async def test_a_promotion_keeps_the_tokens_of_an_answer_that_is_no_stream() -> None:
    job = new_job("echo", sampling=SHORT, mode="final")
    async with MemoryBus() as bus:
        async with echo_worker(bus):
            whole = (await ask(bus, job)).last
        async with echo_worker(bus, step_s=0.05, batch_patience_s=0.001):
            again = msgspec.structs.replace(job, request_id="again")
            promoted = (await ask(bus, again, "batch")).last

    assert isinstance(whole, Completed)
    assert isinstance(promoted, Completed)
    assert promoted.choices == whole.choices


async def test_a_reply_queue_that_refuses_costs_its_own_job_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delivery, "_RETRY_PAUSE_S", 0.01)
    job = new_job("echo", mode="final")
    key = topology.reply_binding(f"reply.{job.request_id}")
    async with MemoryBus() as bus, echo_worker(bus):
        await bus.declare(Queue(key.routing_key, (key,), max_length=0))
        await publish(bus, job)
        log = await ask(bus, new_job("echo"))
        async with bus.consume(topology.DEAD_LETTERS.name) as consumer:
            dead = await anext(consumer)

    assert isinstance(log.last, Finished)
    assert dead.message.correlation_id == job.request_id


class RefusedBus(MemoryBus):
    """Says when an event was refused."""

    def __init__(self) -> None:
        super().__init__()
        self.is_refused = asyncio.Event()

    async def publish(self, binding: Binding, message: Message) -> None:
        try:
            await super().publish(binding, message)
        except PublishRefused:
            self.is_refused.set()
            raise


async def test_a_reply_queue_that_refuses_for_a_moment_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delivery, "_MAX_REFUSED", 100_000)  # however long the moment is
    job = new_job("echo", sampling=SHORT)
    key = topology.reply_binding(f"reply.{job.request_id}")
    async with RefusedBus() as bus, echo_worker(bus):
        await bus.declare(Queue(key.routing_key, (key,), max_length=1))
        await publish(bus, job)
        await bus.is_refused.wait()
        async with bus.consume(key.routing_key) as consumer:
            log = await read(bus, job, consumer)

    assert isinstance(log.last, Finished)
    assert len(log.token_ids) == 30


async def test_a_reply_queue_that_nobody_else_may_see_harms_nobody() -> None:
    job = new_job("echo", sampling=SamplingParams(max_tokens=150, ignore_eos=True))
    key = topology.reply_binding(f"reply.{job.request_id}")
    broker = MemoryBroker()
    async with MemoryBus(broker) as bus, echo_worker(broker, step_s=0.01):
        await bus.declare(Queue(key.routing_key, (key,), is_exclusive=True))
        await publish(bus, job)
        async with bus.consume(key.routing_key) as consumer:
            log = await read(bus, job, consumer)

    assert len(log.token_ids) == 150


async def test_a_job_whose_id_another_publisher_uses_is_refused() -> None:
    job = new_job("echo", sampling=SamplingParams(max_tokens=200, ignore_eos=True))
    other, brake = new_job("echo"), Brake(3)
    async with (
        MemoryBus() as bus,
        echo_worker(bus, brake=brake),
        reading(bus, job) as consumer,
        reading(bus, other) as their_consumer,
    ):
        await publish(bus, job)
        log = await read(bus, job, consumer, num_tokens=2)
        stolen = Message(messages.encode(job), reply_to=f"reply.{other.request_id}")
        await bus.publish(topology.jobs_binding("echo", "interactive"), stolen)
        refusal = messages.decode_event((await anext(their_consumer)).message.body)
        brake.release()
        log = await read(bus, job, consumer, log)

    assert isinstance(refusal, Failed)
    assert len(log.token_ids) == 200


async def test_cancelling_twice_frees_the_place_for_the_next_job() -> None:
    job = new_job("echo", sampling=LONG)
    async with MemoryBus() as bus, echo_worker(bus, step_s=0.005, max_num_seqs=1):
        async with reading(bus, job) as consumer:
            await publish(bus, job)
            log = await read(bus, job, consumer, num_tokens=2)
            address = topology.worker_binding(str(log.reader.worker))
            for _ in range(2):
                await bus.publish(
                    address, Message(messages.encode(Cancel(request_id=job.request_id)))
                )
        async with asyncio.timeout(30):
            other = await ask(bus, new_job("echo"))

    assert isinstance(other.last, Finished)


async def test_a_worker_that_is_stopped_before_it_takes_jobs_ends() -> None:
    async with asyncio.timeout(30):
        async with MemoryBus() as bus, echo_worker(bus) as stop:
            stop.set()


async def test_a_health_probe_is_answered_while_a_connection_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health_server._QuietHandler, "timeout", None)  # it is never given up
    port = free_port()
    async with MemoryBus() as bus, echo_worker(bus, health_port=port):
        _, silent = await asyncio.open_connection("127.0.0.1", port)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /live HTTP/1.0\r\n\r\n")
        async with asyncio.timeout(60):
            answer = await reader.readline()
        for connection in (silent, writer):
            connection.close()
            with suppress(ConnectionError):
                await connection.wait_closed()

    assert b"200 OK" in answer
