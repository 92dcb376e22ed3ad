"""Requests that take too long."""

import asyncio
import math
from typing import Any

import httpx
import pytest

from shared import topology
from shared.bus.memory import MemoryBroker, MemoryBus
from tests.support.gateway.http import LiveGateway, events, eventually, live_gateway, skip
from tests.support.workers.scripted_worker import ScriptedJob, ScriptedWorker

TIMEOUT_S = 60


async def never_end(job: ScriptedJob) -> None:
    await job.start()
    await job.say("one")
    await asyncio.Event().wait()


async def late(gateway: LiveGateway, **more: Any) -> httpx.Response:
    """The answer to a request whose time is over once its worker is known to have started: only
    such a worker is sent `Cancel`."""
    asking = asyncio.create_task(gateway.chat(timeout=TIMEOUT_S, **more))

    async def is_running() -> bool:
        return await gateway.sample("warren_gateway_requests_running") == 1

    await eventually(is_running)
    skip(TIMEOUT_S)
    return await asking


async def test_an_answer_that_is_late_is_an_error_that_forbids_a_retry(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    worker.script = never_end

    response = await late(gateway)

    assert response.status_code == 504
    assert response.headers["x-should-retry"] == "false"
    assert response.json()["error"]["code"] == "deadline_exceeded"
    await worker.wait_cancelled(worker.jobs[0].job.request_id)


async def test_a_stream_that_is_late_ends_with_an_error(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    worker.script = never_end

    body = (await late(gateway, stream=True)).text

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
        bus.sever(for_s=math.inf)

        refused = await gateway.chat()
        bus.sever()  # from now on it connects again
        await bus.wait_connected()
        taken = await gateway.chat()

    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    assert taken.status_code == 200
