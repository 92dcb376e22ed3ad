"""Requests that take too long."""

import asyncio

import pytest

from shared import topology
from shared.bus.memory import MemoryBroker, MemoryBus
from tests.support.gateway.http import LiveGateway, events, live_gateway
from tests.support.workers.scripted_worker import ScriptedJob, ScriptedWorker

TIMEOUT_S = 3
"""Time for a busy machine: only a worker that is known to have started is sent `Cancel`."""


async def never_end(job: ScriptedJob) -> None:
    await job.start()
    await job.say("one")
    await asyncio.Event().wait()


async def test_an_answer_that_is_late_is_an_error_that_forbids_a_retry(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    worker.script = never_end

    response = await gateway.chat(timeout=TIMEOUT_S)

    assert response.status_code == 504
    assert response.headers["x-should-retry"] == "false"
    assert response.json()["error"]["code"] == "deadline_exceeded"
    await worker.wait_cancelled(worker.jobs[0].job.request_id)


async def test_a_stream_that_is_late_ends_with_an_error(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    worker.script = never_end

    body = (await gateway.chat(stream=True, timeout=TIMEOUT_S)).text

    assert events(body)[-1]["error"]["code"] == "deadline_exceeded"
    await worker.wait_cancelled(worker.jobs[0].job.request_id)


async def test_a_job_that_no_worker_took_in_time_is_answered_without_one(
    gateway: LiveGateway, worker: ScriptedWorker, bus: MemoryBus
) -> None:
    await bus.declare(topology.jobs_queue("asleep", "interactive"))

    response = await gateway.chat(model="asleep", timeout=0.2)

    assert response.status_code == 504


@pytest.mark.parametrize(("body", "expected_s"), [({}, 600), ({"timeout": 5}, 5)])
async def test_the_job_knows_its_deadline(
    gateway: LiveGateway, worker: ScriptedWorker, body: dict[str, float], expected_s: float
) -> None:
    await gateway.chat(**body)

    job = worker.jobs[0].job
    assert job.deadline is not None
    assert job.deadline - job.created_at == pytest.approx(expected_s)


async def test_during_an_outage_of_the_broker_new_requests_are_asked_to_come_back(
    broker: MemoryBroker, worker: ScriptedWorker
) -> None:
    async with MemoryBus(broker) as bus, live_gateway(bus) as gateway:
        assert (await gateway.chat()).status_code == 200
        bus.sever(for_s=2.0)

        refused = await gateway.chat()
        await bus.wait_connected()
        taken = await gateway.chat()

    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    assert taken.status_code == 200
