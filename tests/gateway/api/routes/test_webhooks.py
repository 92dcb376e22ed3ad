"""Webhooks from the operator's order to the endpoint."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types.webhooks import BatchCompletedWebhookEvent

from shared.bus.memory import MemoryBroker, MemoryBus
from tests.support.deployment.processes import free_port
from tests.support.gateway.batches import chat, ended, order
from tests.support.gateway.http import SECRET, LiveGateway, eventually, live_gateway
from tests.support.gateway.webhooks import FAILED, OK, Receiver, receiving
from tests.support.workers.scripted_worker import (
    MODEL,
    ScriptedJob,
    ScriptedWorker,
    start_only,
    words,
)

PATH = "/admin/v1/webhooks"


@pytest.fixture
async def storing(
    bus: MemoryBus, worker: ScriptedWorker, tmp_path: Path
) -> AsyncIterator[LiveGateway]:
    options: Any = {
        "data_dir": tmp_path,
        "webhook_networks": "127.0.0.0/8",
        "webhook_max_tries": 1,
    }
    async with live_gateway(bus, **options) as gateway:
        yield gateway


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as receiver:
        yield receiver


async def created(gateway: LiveGateway, url: str, **more: Any) -> Any:
    response = await gateway.post(PATH, url=url, **more)
    assert response.status_code == 200, response.text
    return response.json()


def error_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["param"]


async def test_every_end_of_a_batch_is_announced(
    storing: LiveGateway, worker: ScriptedWorker, receiver: Receiver
) -> None:
    webhook = await created(storing, receiver.url)
    completed = await ended(storing, await order(storing, [chat("a")]))
    failed = await ended(storing, await order(storing, ["no JSON"]))
    worker.script = start_only
    expired = await ended(storing, await order(storing, [chat("a")], window="1s"))
    running = await order(storing, [chat("a")])
    cancelled = await storing.openai.batches.cancel(running.id)

    received = await receiver.wait(4)

    events = [one.unwrapped(webhook["signing_secret"]) for one in received]
    assert {event.type: event.data.id for event in events} == {
        "batch.completed": completed.id,
        "batch.failed": failed.id,
        "batch.expired": expired.id,
        "batch.cancelled": cancelled.id,
    }
    (first,) = [event for event in events if isinstance(event, BatchCompletedWebhookEvent)]
    assert completed.completed_at is not None
    assert completed.completed_at <= first.created_at <= failed.created_at


async def test_a_secret_is_shown_when_it_is_made(storing: LiveGateway) -> None:
    made = await created(storing, "https://hooks.example", name="hook", tenant="acme")
    path = f"{PATH}/{made['id']}"
    rotation = await storing.post(f"{path}/rotate_secret", keep_old_secret_active_for_24_hours=True)

    (listed,) = (await storing.http.get(PATH, params={"tenant": "acme"})).json()["data"]

    secret = rotation.json()["signing_secret"]
    assert secret.startswith("whsec_")
    assert secret != made["signing_secret"]
    assert (listed["id"], listed["object"], listed["name"]) == (
        made["id"],
        "webhook_endpoint",
        "hook",
    )
    assert listed["signing_secret_hint"] == f"…{secret[-4:]}"
    assert "signing_secret" not in listed
    assert (await storing.http.get(path)).json() == listed
    assert (await storing.http.get(PATH, params={"tenant": "other"})).json()["data"] == []


async def test_a_webhook_is_changed_and_removed(storing: LiveGateway) -> None:
    path = f"{PATH}/{(await created(storing, 'https://hooks.example'))['id']}"

    changed = await storing.post(
        path, url="https://hooks.example/new", event_types=["batch.failed"]
    )
    removed = await storing.http.delete(path)

    assert changed.json()["url"] == "https://hooks.example/new"
    assert changed.json()["event_types"] == ["batch.failed"]
    assert removed.json()["deleted"] is True
    for response in (
        await storing.http.get(path),
        await storing.post(path, name="new"),
        await storing.post(f"{path}/rotate_secret"),
        await storing.post(f"{path}/test", event_type="batch.failed"),
        await storing.http.delete(path),
    ):
        assert error_of(response) == (404, "webhook_id")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "url"),
        ({"url": "ftp://hooks.example"}, "url"),
        ({"url": "https://hooks.example", "event_types": ["batch.started"]}, "event_types"),
    ],
)
async def test_bad_webhooks_are_refused(storing: LiveGateway, body: Any, param: str) -> None:
    assert error_of(await storing.post(PATH, **body)) == (400, param)


async def test_a_change_names_what_to_change(storing: LiveGateway) -> None:
    made = await created(storing, "https://hooks.example")

    for body in ({}, {"url": "no URL"}):
        assert (await storing.post(f"{PATH}/{made['id']}", **body)).status_code == 400


async def test_a_test_shows_the_endpoints_answer(storing: LiveGateway, receiver: Receiver) -> None:
    made = await created(storing, receiver.url)
    receiver.answers = [FAILED]

    result = await storing.post(f"{PATH}/{made['id']}/test", event_type="batch.expired")

    assert (result.json()["status_code"], result.json()["event_type"]) == (500, "batch.expired")
    assert result.json()["success"] is False
    (received,) = receiver.received
    assert received.unwrapped(made["signing_secret"]).type == "batch.expired"


async def test_a_test_says_why_there_is_no_answer(storing: LiveGateway) -> None:
    made = await created(storing, f"http://127.0.0.1:{free_port()}")

    result = await storing.post(f"{PATH}/{made['id']}/test", event_type="batch.failed")

    assert error_of(result) == (400, "url")
    assert "did not answer" in result.json()["error"]["message"]


async def test_dead_deliveries_are_listed_and_sent_again(
    storing: LiveGateway, receiver: Receiver
) -> None:
    await created(storing, receiver.url)
    receiver.answers = [FAILED]
    batch = await order(storing, ["no JSON"])
    await receiver.wait()

    async def is_dead() -> bool:
        return bool((await storing.http.get(f"{PATH}/dead")).json()["data"])

    await eventually(is_dead)
    (dead,) = (await storing.http.get(f"{PATH}/dead")).json()["data"]
    receiver.answers = [OK]
    retried = await storing.post(f"{PATH}/dead/{dead['id']}/retry")
    first, second = await receiver.wait(2)

    assert (dead["object_id"], dead["type"], dead["reason"]) == (
        batch.id,
        "batch.failed",
        "status 500",
    )
    assert retried.json() == {"id": dead["id"], "status": "retried"}
    assert first.headers["webhook-id"] == second.headers["webhook-id"] == dead["event_id"]
    again = await storing.post(f"{PATH}/dead/{dead['id']}/retry")
    assert error_of(again) == (404, "delivery_id")


async def test_the_ends_of_background_responses_are_announced_whoever_accepted_them(
    broker: MemoryBroker, worker: ScriptedWorker, receiver: Receiver, tmp_path: Path
) -> None:
    may_end = asyncio.Event()

    async def end_as_asked(job: ScriptedJob) -> None:
        await job.start()
        await may_end.wait()
        (prompt,) = job.job.prompts
        match words(prompt)[-1]:
            case "complete":
                await job.finish("done")
            case "incomplete":
                await job.finish("d", reason="length")
            case "fail":
                await job.fail("internal_error", "The worker failed.")
            case _:
                await start_only(job)

    worker.script = end_as_asked
    options = {"data_dir": tmp_path, "webhook_networks": "127.0.0.0/8", "secret": SECRET}
    asked = ("complete", "incomplete", "fail", "cancel")

    async with MemoryBus(broker) as one, live_gateway(one, **options) as second:
        webhook = await created(second, receiver.url)
        async with MemoryBus(broker) as other, live_gateway(other, **options) as first:
            create = first.openai.responses.create
            orders = [await create(model=MODEL, input=word, background=True) for word in asked]
            ids = {word: order.id for word, order in zip(asked, orders, strict=True)}
            await worker.wait_until(lambda: len(worker.jobs) == len(asked))
        may_end.set()
        await second.openai.responses.cancel(ids["cancel"])
        received = await receiver.wait(4)

    events = [one.unwrapped(webhook["signing_secret"]) for one in received]
    assert {event.type: event.data.id for event in events} == {
        "response.completed": ids["complete"],
        "response.incomplete": ids["incomplete"],
        "response.failed": ids["fail"],
        "response.cancelled": ids["cancel"],
    }
