"""A client that leaves takes its work with it."""

import asyncio
from contextlib import suppress

import httpx
import pytest

from shared.bus.memory import MemoryBus
from shared.topology import reply_queue
from tests.support.gateway.http import LiveGateway, chat_body, eventually
from tests.support.workers.scripted_worker import ScriptedJob, ScriptedWorker

CHAT = "/v1/chat/completions"


async def until_cancelled(job: ScriptedJob) -> None:
    await job.start()
    await job.say("one")
    await asyncio.Event().wait()


async def never_start(job: ScriptedJob) -> None:
    """A worker that is still busy with others: it says its first word when nobody waits."""
    await eventually(job.is_unread)
    await job.start()


async def leave(
    gateway: LiveGateway, worker: ScriptedWorker, *, stream: bool, has_begun: bool = True
) -> str:
    """Ask, wait until a worker has the job and, with ``has_begun``, until the gateway knows that it
    has begun, and hang up; returns the request's id."""
    num_jobs = len(worker.jobs)
    asking = asyncio.create_task(gateway.http.post(CHAT, json=chat_body(stream=stream)))
    await worker.wait_until(lambda: len(worker.jobs) > num_jobs)
    if has_begun:

        async def is_running() -> bool:
            return await gateway.sample("warren_gateway_requests_running") == 1

        await eventually(is_running)
    asking.cancel()
    with suppress(asyncio.CancelledError):
        await asking
    return worker.jobs[-1].job.request_id


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_after_the_first_token_cancels_the_job(
    gateway: LiveGateway, worker: ScriptedWorker, stream: bool
) -> None:
    worker.script = until_cancelled

    request_id = await leave(gateway, worker, stream=stream)

    await worker.wait_cancelled(request_id)
    await worker.wait_until(lambda: worker.num_running == 0)


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_before_the_first_word_makes_the_worker_drop_the_job(
    gateway: LiveGateway, worker: ScriptedWorker, stream: bool
) -> None:
    worker.script = never_start

    await leave(gateway, worker, stream=stream, has_begun=False)

    await worker.wait_until(lambda: worker.num_dropped == 1)
    assert worker.commands == []


async def test_a_reader_that_stops_in_the_middle_of_a_stream_cancels_it(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    worker.script = until_cancelled

    stream = await gateway.openai.chat.completions.create(
        model="scripted", messages=[{"role": "user", "content": "x"}], stream=True
    )
    await anext(aiter(stream))
    await stream.close()

    await worker.wait_cancelled(worker.jobs[0].job.request_id)


async def test_nothing_is_left_behind(
    gateway: LiveGateway, worker: ScriptedWorker, bus: MemoryBus
) -> None:
    worker.script = until_cancelled
    request_id = await leave(gateway, worker, stream=True)
    await worker.wait_until(lambda: worker.num_running == 0)

    async def is_gone() -> bool:
        return await bus.inspect(reply_queue(request_id, 60).name) is None

    async def is_idle() -> bool:
        num_requests = (await gateway.http.get("/health")).json()["requests"]
        num_running = await gateway.sample("warren_gateway_requests_running")
        return (num_requests, num_running) == (0, 0)

    await eventually(is_gone)
    await eventually(is_idle)


async def test_a_client_that_leaves_in_the_middle_of_its_body_harms_nobody(
    gateway: LiveGateway,
) -> None:
    host, port = gateway.http.base_url.host, gateway.http.base_url.port
    _, writer = await asyncio.open_connection(host, port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b'content-length: 1000\r\n\r\n{"model"'
    )
    await writer.drain()
    writer.close()
    await writer.wait_closed()

    response: httpx.Response = await gateway.chat()

    assert response.status_code == 200
    assert await gateway.sample("warren_gateway_errors_total") == 0
