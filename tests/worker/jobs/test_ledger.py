"""The records of requests, on their way to the broker."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import pytest

from shared import topology
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.messages import UsageRecord, decode_record
from worker.jobs.ledger import Ledger
from worker.jobs.metrics import JobMetrics

RECORD = UsageRecord(
    request_id="r", model="m", job_class="batch", outcome="completed", ended_at=1.0
)
QUEUE = topology.LEDGER_RECORDS


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
    monkeypatch.setattr("worker.jobs.ledger._PATIENCE_S", 0.0)
    metrics = JobMetrics("m", 1)
    ledger = Ledger(bus, metrics)
    await bus.declare(dataclasses.replace(QUEUE, max_length=1))

    await asyncio.gather(*(ledger.record(RECORD) for _ in range(3)))

    assert results(metrics) == {"confirmed": 1, "lost": 2}
    assert "usage record lost" in caplog.text
