"""Clients whose connection broke during the last bytes, over either bus."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeAlias

import httpx
import pytest

from shared import topology
from shared.bus.base import Bus
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.bus.rabbit import RabbitBus
from tests.support.deployment.broker import Broker
from tests.support.gateway.http import LiveGateway, chat_body, events, eventually, live_gateway
from tests.support.workers.scripted_worker import ScriptedJob, ScriptedWorker

Connect: TypeAlias = Callable[[str], AbstractAsyncContextManager[Bus]]
"""Connects a user of the broker."""

CHAT = "/v1/chat/completions"
NUMBERED = {"accept": "text/event-stream"}
"""Headers that ask for events with ids."""
GRACE_S = 600.0
"""The time in which a client may resume, before a log's end and after it. No test lasts as long."""
BRIEF_GRACE_S = 1.0


@pytest.fixture(params=["memory", pytest.param("rabbit", marks=pytest.mark.rabbit)])
async def connect(request: pytest.FixtureRequest) -> Connect:
    if request.param == "memory":
        memory = MemoryBroker()
        return lambda user: MemoryBus(memory)
    broker: Broker = request.getfixturevalue("broker")
    return lambda user: RabbitBus(broker.url_of(user))


@pytest.fixture
async def worker(connect: Connect) -> AsyncIterator[ScriptedWorker]:
    async with connect("worker") as bus, ScriptedWorker(bus) as worker:
        yield worker
        await worker.wait_settled()


@pytest.fixture
async def gateways(connect: Connect, worker: ScriptedWorker) -> AsyncIterator[list[LiveGateway]]:
    """Two gateways of a deployment."""
    async with (
        connect("gateway") as one,
        connect("gateway") as other,
        live_gateway(one, disconnect_grace_s=GRACE_S) as first,
        live_gateway(other, disconnect_grace_s=GRACE_S) as second,
    ):
        yield [first, second]


def chat() -> dict[str, Any]:
    return chat_body(stream=True, stream_options={"include_usage": True})


async def ask_numbered(gateway: LiveGateway) -> tuple[str, list[str]]:
    """The path of a stream that was read to its end, and its events."""
    response = await gateway.http.post(CHAT, json=chat(), headers=NUMBERED)
    return path_of(response), blocks_of(response.text)


def path_of(response: httpx.Response) -> str:
    return f"/v1/streams/{response.headers['x-request-id']}"


async def come_back(gateway: LiveGateway, path: str, last_id: str) -> httpx.Response:
    return await gateway.http.get(path, headers={"last-event-id": last_id})


def blocks_of(body: str) -> list[str]:
    return [block for block in body.split("\n\n") if block]


def id_of(block: str) -> str:
    found = re.search(r"^id: (\S+)$", block, re.MULTILINE)
    assert found is not None, block
    return found[1]


async def test_what_was_lost_at_the_end_is_there_whichever_part_it_was(
    gateways: list[LiveGateway],
) -> None:
    path, blocks = await ask_numbered(gateways[0])
    *places, last, done = range(len(blocks))

    for place in places:
        rest = await come_back(gateways[place % 2], path, id_of(blocks[place]))
        assert blocks_of(rest.text) == blocks[place + 1 :]
    assert blocks[done] == "data: [DONE]"
    assert (await come_back(gateways[1], path, id_of(blocks[last]))).status_code == 204


async def test_a_failure_that_was_lost_is_there_too(
    gateways: list[LiveGateway], worker: ScriptedWorker
) -> None:
    has_begun = asyncio.Event()

    async def fail(job: ScriptedJob) -> None:
        await job.start()
        await job.say("one")
        await has_begun.wait()  # or the error is the response to a request
        await job.fail("worker_lost", "gone")

    worker.script = fail
    body = ""
    async with gateways[0].http.stream("POST", CHAT, json=chat(), headers=NUMBERED) as response:
        async for piece in response.aiter_text():
            body += piece
            has_begun.set()
    path, blocks = path_of(response), blocks_of(body)

    for gateway in (*gateways, *gateways):
        (error,) = events((await come_back(gateway, path, id_of(blocks[-2]))).text)
        assert error["error"]["code"] == "worker_lost"
    assert (await come_back(gateways[1], path, id_of(blocks[-1]))).status_code == 204


async def is_gone(bus: Bus, request_id: str) -> bool:
    """Whether a stream no longer has a log."""
    return await bus.inspect(topology.reply_key(request_id)) is None


async def test_an_ended_stream_is_kept_for_a_while_and_not_longer(
    connect: Connect, gateways: list[LiveGateway], worker: ScriptedWorker
) -> None:
    kept_path, kept_blocks = await ask_numbered(gateways[0])
    async with (
        connect("gateway") as bus,
        live_gateway(bus, disconnect_grace_s=BRIEF_GRACE_S) as brief,
    ):
        asked_at = time.monotonic()
        path, blocks = await ask_numbered(brief)
        await eventually(lambda: is_gone(worker.bus, path.rpartition("/")[2]))
        lasted_s = time.monotonic() - asked_at
        too_late = await come_back(gateways[1], path, id_of(blocks[0]))
    in_time, again = [
        await come_back(gateway, kept_path, id_of(kept_blocks[0])) for gateway in reversed(gateways)
    ]

    assert lasted_s >= BRIEF_GRACE_S
    assert (too_late.status_code, too_late.json()["error"]["code"]) == (410, "stream_expired")
    assert blocks_of(in_time.text) == blocks_of(again.text) == kept_blocks[1:]


async def test_a_stream_without_ids_is_not_kept(
    gateways: list[LiveGateway], worker: ScriptedWorker
) -> None:
    response = await gateways[0].http.post(CHAT, json=chat())

    await eventually(lambda: is_gone(worker.bus, response.headers["x-request-id"]))
