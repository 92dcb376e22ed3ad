"""The records of requests, on their way to the broker."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import pytest

from shared import topology
from shared.bus.base import Binding, Message
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.messages import (
    Completed,
    EmbeddingJob,
    Finished,
    GenerationJob,
    TextPrompt,
    UsageRecord,
    decode_record,
)
from shared.topology import Lane
from tests.support.workers.jobs import ask, new_job, publish
from tests.support.workers.synthetic import echo_worker
from worker.jobs import delivery
from worker.jobs.delivery import Ledger
from worker.jobs.metrics import JobMetrics
from worker.jobs.observation import JobObservation
from worker.process import service

RECORD = UsageRecord(
    request_id="r", model="m", job_class="batch", outcome="completed", ended_at=1.0
)
QUEUE = topology.LEDGER_RECORDS
RECORD_KEY = QUEUE.bindings[0].routing_key


@pytest.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    async with MemoryBus(MemoryBroker()) as bus:
        yield bus


def results(metrics: JobMetrics) -> dict[str, float]:
    found = metrics.catalog.registry.get_sample_value
    name = "warren_worker_usage_records_total"
    return {
        result: found(name, {"model": "m", "result": result}) or 0
        for result in ("confirmed", "lost")
    }


async def received(bus: MemoryBus) -> UsageRecord:
    async with bus.consume(QUEUE.name) as consumer:
        return decode_record((await anext(consumer)).message.body)


async def test_a_record_waits_for_its_queue(bus: MemoryBus) -> None:
    metrics = JobMetrics("m", 1)

    await Ledger(bus, metrics).record(RECORD)

    assert await received(bus) == RECORD
    assert results(metrics) == {"confirmed": 1, "lost": 0}


async def test_a_record_outlasts_the_connection(bus: MemoryBus) -> None:
    await bus.declare(QUEUE)
    bus.sever()

    await Ledger(bus, JobMetrics("m", 1)).record(RECORD)

    assert await received(bus) == RECORD


async def test_a_full_queue_loses_records_and_says_so(
    bus: MemoryBus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("worker.jobs.delivery._RECORD_PATIENCE_S", 0.0)
    metrics = JobMetrics("m", 1)
    ledger = Ledger(bus, metrics)
    await bus.declare(dataclasses.replace(QUEUE, max_length=1))

    await asyncio.gather(*(ledger.record(RECORD) for _ in range(3)))

    assert results(metrics) == {"confirmed": 1, "lost": 2}
    assert "usage record lost" in caplog.text


class SlowLedger(MemoryBus):
    """Confirms a usage record long after it was sent, and keeps the order of all messages."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker)
        self.done: list[str] = []
        """The routing keys of messages, in the order of their confirmations."""

    async def publish(self, binding: Binding, message: Message) -> None:
        if binding == QUEUE.bindings[0]:
            await asyncio.sleep(0.05)
        await super().publish(binding, message)
        self.done.append(binding.routing_key)


@pytest.mark.parametrize("mode", ["stream", "final"])
async def test_an_answer_ends_only_once_its_use_is_recorded(mode: str) -> None:
    broker = MemoryBroker()
    job = new_job("echo", mode=mode)

    async with MemoryBus(broker) as client, SlowLedger(broker) as bus, echo_worker(bus):
        await ask(client, job)
        sent = [key for key in bus.done if key in (f"reply.{job.request_id}", RECORD_KEY)]

    assert sent[-2:] == [RECORD_KEY, f"reply.{job.request_id}"]


@pytest.mark.parametrize("mode", ["stream", "final"])
async def test_an_answer_ends_although_its_use_cannot_be_recorded(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> UsageRecord:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(JobObservation, "recorded", fail)
    async with MemoryBus() as bus, echo_worker(bus, drain_grace_s=0.1):
        log = await ask(bus, new_job("echo", mode=mode))

    assert isinstance(log.last, Finished | Completed)


class HeldLedger(MemoryBus):
    """Confirms no usage record for the time being."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker)
        self.is_recording, self.may_record = asyncio.Event(), asyncio.Event()

    async def publish(self, binding: Binding, message: Message) -> None:
        if binding == QUEUE.bindings[0]:
            self.is_recording.set()
            await self.may_record.wait()
        await super().publish(binding, message)


@pytest.mark.parametrize(
    ("job", "lane"),
    [
        (new_job("echo"), "interactive"),
        (EmbeddingJob(request_id="quick", model="echo", prompts=(TextPrompt(text="a"),)), "quick"),
    ],
    ids=["generation", "embedding"],
)
async def test_a_record_outlasts_the_job_that_a_drain_cuts_off(
    job: GenerationJob | EmbeddingJob, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "_RECORDED_WITHIN_S", 0.05)
    monkeypatch.setattr(service, "_HAND_OVER_TIMEOUT_S", 0.1)
    broker = MemoryBroker()
    held, wait = HeldLedger(broker), Ledger.wait

    async def wait_after_the_jobs(self: Ledger, _timeout_s: float) -> None:
        held.may_record.set()
        await wait(self, 120)

    monkeypatch.setattr(Ledger, "wait", wait_after_the_jobs)
    async with MemoryBus(broker) as client:
        log = topology.reply_queue(job.request_id, expires_s=600)
        await client.declare(log)
        async with (
            held as bus,
            echo_worker(bus, drain_grace_s=0.1),
            client.consume(log.name) as consumer,
        ):
            await publish(client, job, lane)
            await anext(consumer)
            await held.is_recording.wait()
        record = await received(client)

    assert record.request_id == job.request_id
