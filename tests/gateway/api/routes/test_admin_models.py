"""Models that nobody serves any more, and requests that do not wait for workers."""

import asyncio

import pytest

from shared import topology
from shared.bus.base import Message
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.errors import AccessRefused
from shared.messages import encode
from tests.gateway.fleet.announcements import announcement
from tests.support.gateway.http import (
    LiveGateway,
    eventually,
    hears_a_worker,
    live_gateway,
)
from tests.support.workers.jobs import num_ready
from tests.support.workers.scripted_worker import MODEL, ScriptedWorker

GONE = "gone"
INTERACTIVE = topology.jobs_queue(GONE, "interactive").name


@pytest.fixture
async def queues(bus: MemoryBus) -> None:
    """The queues of a model whose workers are gone."""
    await bus.declare(*topology.lasting_resources(GONE))


async def waits(bus: MemoryBus, num: int = 1) -> None:
    async def are_waiting() -> bool:
        return await num_ready(bus, INTERACTIVE) == num

    await eventually(are_waiting)


@pytest.mark.usefixtures("queues")
async def test_a_model_is_removed_with_its_queues_and_its_requests_end(
    gateway: LiveGateway, bus: MemoryBus
) -> None:
    waiting = asyncio.create_task(gateway.chat(model=GONE))
    streaming = asyncio.create_task(gateway.chat(model=GONE, stream=True))
    await waits(bus, 2)

    removed = await gateway.http.delete(f"/admin/v1/models/{GONE}")
    ended, streamed = await waiting, await streaming

    assert removed.json() == {"model": GONE, "num_jobs": 2}
    assert ended.status_code == streamed.status_code == 404
    assert "removed" in ended.json()["error"]["message"]
    assert [await bus.inspect(topology.jobs_queue(GONE, lane).name) for lane in topology.LANES] == [
        None
    ] * len(topology.LANES)
    assert (await gateway.chat(model=GONE)).status_code == 404


@pytest.mark.usefixtures("queues")
async def test_a_stream_that_had_begun_ends_with_an_error(
    gateway: LiveGateway, bus: MemoryBus, worker: ScriptedWorker
) -> None:
    await hears_a_worker(gateway)
    async with bus.consume(INTERACTIVE) as consumer:
        streaming = asyncio.create_task(gateway.chat(model=GONE, stream=True))
        await anext(consumer)  # its worker dies
    await waits(bus)

    await gateway.http.delete(f"/admin/v1/models/{GONE}")

    assert (await streaming).status_code == 404


@pytest.mark.usefixtures("queues")
async def test_gateways_forget_a_removed_model_and_export_nothing_of_it(
    gateway: LiveGateway, bus: MemoryBus
) -> None:
    heard = announcement("a", model=GONE, is_leaving=False)
    await bus.publish(topology.ANNOUNCEMENTS, Message(encode(heard)))

    async def names_it() -> bool:
        return f'model="{GONE}"' in (await gateway.http.get("/metrics")).text

    await eventually(names_it)
    leaving = announcement("a", model=GONE, is_leaving=True)
    await bus.publish(topology.ANNOUNCEMENTS, Message(encode(leaving)))

    async def is_removed() -> bool:
        answer = await gateway.http.delete(f"/admin/v1/models/{GONE}")
        return answer.status_code == 200

    await eventually(is_removed)

    async def is_silent() -> bool:
        samples = (await gateway.http.get("/metrics")).text.splitlines()
        fleet = ("warren_fleet_", "warren_queue_")
        return not any(line.startswith(fleet) and GONE in line for line in samples)

    await eventually(is_silent)
    listed = (await gateway.http.get("/admin/v1/models")).json()["data"]
    assert GONE not in [one["model"] for one in listed]


async def test_a_model_with_workers_is_listed_and_not_removed(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    await hears_a_worker(gateway)

    refused = await gateway.http.delete(f"/admin/v1/models/{MODEL}")
    [listed] = (await gateway.http.get("/admin/v1/models")).json()["data"]

    assert refused.status_code == 409
    assert "drain" in refused.json()["error"]["message"]
    assert (listed["model"], listed["num_workers"], listed["num_waiting"]) == (MODEL, 1, 0)


class LimitedBus(MemoryBus):
    """That of a gateway with the shipped permissions."""

    async def delete_queue(self, name: str) -> None:
        if name.startswith("jobs."):
            raise AccessRefused(f"access to queue '{name}' refused")
        await super().delete_queue(name)


@pytest.mark.usefixtures("queues")
async def test_a_gateway_that_may_not_remove_a_model_says_who_may(broker: MemoryBroker) -> None:
    async with LimitedBus(broker) as bus, live_gateway(bus) as gateway:
        refused = await gateway.http.delete(f"/admin/v1/models/{GONE}")

    assert refused.status_code == 409
    assert "warren models remove" in refused.json()["error"]["message"]


async def test_an_unknown_model_is_not_removed(gateway: LiveGateway) -> None:
    assert (await gateway.http.delete("/admin/v1/models/unknown")).status_code == 404


@pytest.mark.usefixtures("queues")
async def test_a_gateway_that_requires_a_worker_refuses_at_once(
    broker: MemoryBroker,
) -> None:
    async with live_gateway(broker, require_worker=True, heard_within_s=0.0) as gateway:
        refused = await gateway.chat(model=GONE)
        detached = await gateway.post("/v1/responses", model=GONE, input="one", background=True)

    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    assert GONE in refused.json()["error"]["message"]
    assert detached.status_code == 200


@pytest.mark.usefixtures("queues")
async def test_a_gateway_that_requires_a_worker_serves_models_that_have_one(
    broker: MemoryBroker, worker: ScriptedWorker
) -> None:
    async with live_gateway(broker, require_worker=True) as gateway:
        await hears_a_worker(gateway)
        assert (await gateway.chat()).status_code == 200
