"""Clients whose connection broke during the last bytes, over either bus."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import TypeAlias

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
"""Connects one of the broker's users."""

CHAT = "/v1/chat/completions"
GRACE_S = 3.0
"""The time in which a client may resume, before a log's end and after it."""


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
    """Two of one deployment."""
    async with (
        connect("gateway") as one,
        connect("gateway") as other,
        live_gateway(one, disconnect_grace_s=GRACE_S) as first,
        live_gateway(other, disconnect_grace_s=GRACE_S) as second,
    ):
        yield [first, second]


async def ask(gateway: LiveGateway, **headers: str) -> httpx.Response:
    """Read a stream to its end."""
    body = chat_body(stream=True, stream_options={"include_usage": True})
    return await gateway.http.post(CHAT, json=body, headers=headers)


async def ask_numbered(gateway: LiveGateway) -> tuple[str, list[str]]:
    """The path of a stream that was read to its end, and its events."""
    response = await ask(gateway, accept="text/event-stream")
    return f"/v1/streams/{response.headers['x-request-id']}", blocks_of(response)


async def come_back(gateway: LiveGateway, path: str, last_id: str) -> httpx.Response:
    return await gateway.http.get(path, headers={"last-event-id": last_id})


def blocks_of(response: httpx.Response) -> list[str]:
    return [block for block in response.text.split("\n\n") if block]


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
        assert blocks_of(rest) == blocks[place + 1 :]
    assert blocks[done] == "data: [DONE]"
    assert (await come_back(gateways[1], path, id_of(blocks[last]))).status_code == 204


async def test_a_failure_that_was_lost_is_there_too(
    gateways: list[LiveGateway], worker: ScriptedWorker
) -> None:
    async def fail(job: ScriptedJob) -> None:
        await job.start()
        await job.say("one")
        await asyncio.sleep(0.2)  # or the error is the response to a request
        await job.fail("worker_lost", "gone")

    worker.script = fail
    path, blocks = await ask_numbered(gateways[0])

    for gateway in (*gateways, *gateways):
        (error,) = events((await come_back(gateway, path, id_of(blocks[-2]))).text)
        assert error["error"]["code"] == "worker_lost"
    assert (await come_back(gateways[1], path, id_of(blocks[-1]))).status_code == 204


async def is_gone(bus: Bus, request_id: str) -> bool:
    """Whether a stream no longer has a log."""
    return await bus.inspect(topology.reply_key(request_id)) is None


async def test_an_ended_stream_is_kept_for_a_while_and_not_longer(
    gateways: list[LiveGateway], worker: ScriptedWorker
) -> None:
    early, late = [await ask_numbered(gateways[0]) for _ in range(2)]

    await asyncio.sleep(GRACE_S / 3)
    in_time = await come_back(gateways[1], early[0], id_of(early[1][0]))
    await eventually(lambda: is_gone(worker.bus, late[0].rpartition("/")[2]))
    too_late = await come_back(gateways[1], late[0], id_of(late[1][0]))
    again = await come_back(gateways[0], early[0], id_of(early[1][0]))

    assert blocks_of(in_time) == blocks_of(again) == early[1][1:]
    assert (too_late.status_code, too_late.json()["error"]["code"]) == (410, "stream_expired")


async def test_a_stream_without_ids_is_not_kept(
    gateways: list[LiveGateway], worker: ScriptedWorker
) -> None:
    response = await ask(gateways[0])

    async with asyncio.timeout(GRACE_S / 2):
        await eventually(lambda: is_gone(worker.bus, response.headers["x-request-id"]))
