"""A request that is sent twice is answered once."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from gateway.log.cursor import decode_facts
from shared import topology
from shared.bus.base import Binding, Exchange, Message, Queue
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.bus.memory_queue import MemoryConsumer
from shared.errors import PublishRefused, QueueNotFound
from shared.messages import Accepted, encode
from tests.support.gateway.http import (
    LiveGateway,
    chat_body,
    events,
    eventually,
    live_gateway,
    two_gateways,
)
from tests.support.workers.scripted_worker import ScriptedJob, ScriptedWorker, wait_before_the_end

CHAT = "/v1/chat/completions"
KEY = "order-66"


async def ask(gateway: LiveGateway, key: str = KEY, **more: Any) -> httpx.Response:
    return await gateway.http.post(CHAT, json=chat_body(**more), headers={"idempotency-key": key})


def code_of(response: httpx.Response) -> str:
    code: str = response.json()["error"]["code"]
    return code


async def test_the_line_of_a_retry_says_so(
    bus: MemoryBus, worker: ScriptedWorker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with live_gateway(bus) as gateway:
        await gateway.chat()
        for _ in range(2):
            await ask(gateway)

    lines = [vars(one) for one in caplog.records if one.message == "request accepted"]
    assert ["repeats_earlier" in line for line in lines] == [False, False, True]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_retry_gets_the_same_answer_from_any_gateway(
    broker: MemoryBroker, worker: ScriptedWorker, stream: bool
) -> None:
    async with two_gateways(broker) as gateways:
        answers = [await ask(gateway, stream=stream, seed=1) for gateway in (*gateways, *gateways)]

    assert answers[0].status_code == 200
    assert {answer.text for answer in answers} == {answers[0].text}
    assert {answer.headers["x-request-id"] for answer in answers} == {worker.jobs[0].job.request_id}
    assert len(worker.jobs) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_retry_attaches_to_the_request_that_still_runs(
    broker: MemoryBroker, worker: ScriptedWorker, stream: bool
) -> None:
    may_end = wait_before_the_end(worker, "one ", "two")
    async with two_gateways(broker) as (first, second):
        impatient = asyncio.create_task(ask(first, stream=stream))
        await worker.wait_until(lambda: bool(worker.jobs))
        await asyncio.sleep(0.05)
        impatient.cancel()
        retry = asyncio.create_task(ask(second, stream=stream))
        await asyncio.sleep(0.2)
        may_end.set()
        response = await retry

    assert "two" in response.text
    assert len(worker.jobs) == 1
    assert worker.commands == []


async def test_a_retry_takes_over_from_a_first_request_that_still_waits(
    broker: MemoryBroker, worker: ScriptedWorker
) -> None:
    may_end = wait_before_the_end(worker)
    async with two_gateways(broker) as gateways:
        asked = [asyncio.create_task(ask(gateways[0]))]
        await worker.wait_until(lambda: bool(worker.jobs))

        async def is_read() -> bool:
            state = await worker.bus.inspect(worker.jobs[0].message.reply_to)
            return state is not None and state.num_consumers == 1

        for gateway in (gateways[1], *gateways):
            asked.append(asyncio.create_task(ask(gateway)))
            await asyncio.wait(asked[-2:-1])  # it ends when it is taken over
            await eventually(is_read)
        may_end.set()
        *old, last = [await task for task in asked]

    assert last.status_code == 200
    for response in old:
        assert (response.status_code, code_of(response)) == (409, "taken_over")
        assert response.headers["x-should-retry"] == "true"
    assert len(worker.jobs) == 1


async def test_retries_at_the_same_moment_are_one_request(
    broker: MemoryBroker, worker: ScriptedWorker
) -> None:
    async with two_gateways(broker) as gateways:
        answers = await asyncio.gather(*(ask(gateway) for gateway in (*gateways, *gateways)))

    texts = {answer.text for answer in answers if answer.status_code == 200}
    assert len(texts) == 1
    assert {answer.status_code for answer in answers} <= {200, 409}
    assert len({job.job.request_id for job in worker.jobs}) == 1


@pytest.mark.parametrize("is_running", [True, False])
async def test_another_body_under_the_same_key_is_refused_and_harms_nobody(
    broker: MemoryBroker, worker: ScriptedWorker, is_running: bool
) -> None:
    may_end = wait_before_the_end(worker)
    async with two_gateways(broker) as (first, second):
        if not is_running:
            may_end.set()
        asking = asyncio.create_task(ask(first))
        await worker.wait_until(lambda: bool(worker.jobs))
        await asyncio.sleep(0.2)
        for gateway in (first, second):
            other = await ask(gateway, max_tokens=7, detach=True)
            assert (other.status_code, code_of(other)) == (422, "idempotency_mismatch")
        may_end.set()

        assert (await asking).status_code == 200
        assert (await ask(second)).status_code == 200
    assert len(worker.jobs) == 1


async def test_keys_of_other_kinds_and_other_names_are_other_requests(
    broker: MemoryBroker, worker: ScriptedWorker
) -> None:
    async with two_gateways(broker) as (first, _):
        await ask(first)
        await ask(first, key="order-67")
        await first.http.post(
            "/v1/completions",
            json={"model": "scripted", "prompt": "a b"},
            headers={"idempotency-key": KEY},
        )

    assert len({job.job.request_id for job in worker.jobs}) == 3


async def test_a_request_whose_gateway_died_before_it_was_published_is_published_by_a_retry(
    broker: MemoryBroker, worker: ScriptedWorker, worker_bus: MemoryBus
) -> None:
    async with two_gateways(broker) as (first, _):
        response = await ask(first, key="x")
        request_id = response.headers["x-request-id"]
        job = worker.jobs[0].job
        await worker_bus.delete_queue(f"reply.{request_id}")
        queue = topology.reply_queue(request_id, 60)
        await worker_bus.declare(queue)
        body_hash = decode_facts(job.context).body_hash
        accepted = Accepted(body_hash=body_hash, context=job.context)
        await worker_bus.publish(queue.bindings[0], Message(encode(accepted)))

        again = await ask(first, key="x")

    assert again.text == response.text
    # Were the first one published after all, its worker would come second.
    assert [job.job.publication for job in worker.jobs] == [0, 1]


async def test_a_request_that_failed_is_tried_again(
    broker: MemoryBroker, worker: ScriptedWorker
) -> None:
    async def fail_once(job: ScriptedJob) -> None:
        await job.start()
        if len(worker.jobs) == 1:
            return await job.fail("worker_lost", "gone")
        return await job.finish("done")

    worker.script = fail_once
    async with two_gateways(broker) as (first, second):
        failed = await ask(first)
        await eventually(worker.jobs[0].is_unread)
        answer = await ask(second)

    assert (failed.status_code, code_of(failed)) == (500, "worker_lost")
    assert failed.headers["x-should-retry"] == "false"
    assert answer.status_code == 200


@pytest.mark.parametrize("key", ["", "a b", "ü", "x" * 256])
async def test_a_key_that_is_none_is_refused(gateway: LiveGateway, key: str) -> None:
    response = await gateway.http.post(
        CHAT, json=chat_body(), headers=[(b"idempotency-key", key.encode())]
    )

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "Idempotency-Key"


async def test_a_stream_of_a_key_ends_like_any_other(
    broker: MemoryBroker, worker: ScriptedWorker
) -> None:
    async with two_gateways(broker) as (first, _):
        body = (await ask(first, stream=True)).text

    assert events(body)[-1] == "[DONE]"


@pytest.mark.parametrize("num_words", [10, 400])
async def test_a_long_answer_can_be_had_again_and_deleted(
    gateway: LiveGateway, worker: ScriptedWorker, num_words: int
) -> None:
    async def talk(job: ScriptedJob) -> None:
        await job.start()
        for _ in range(num_words):
            await job.say("word ")
        await job.finish("end")

    worker.script = talk

    first, again = [await ask(gateway, stream=True) for _ in range(2)]
    deleted = await gateway.http.delete(f"/v1/streams/{first.headers['x-request-id']}")

    assert again.text == first.text
    assert deleted.status_code == 200
    assert code_of(await gateway.http.get(deleted.url)) == "stream_expired"


class ForgetfulBus(MemoryBus):
    """Forgets the first logs, as a broker may that was killed."""

    def __init__(self, broker: MemoryBroker, moment: str, num_forgotten: int) -> None:
        super().__init__(broker)
        self._moment = moment
        self._num_left = num_forgotten

    async def declare(self, *resources: Exchange | Queue) -> None:
        for resource in resources:
            if self._forgets(resource.name, "declared"):
                raise QueueNotFound("deleted before it was bound")
        await super().declare(*resources)

    async def publish(self, binding: Binding, message: Message) -> None:
        name = binding.routing_key
        if self._forgets(name, "written"):
            await self.delete_queue(name)
        await super().publish(binding, message)
        if self._forgets(name, "accepted"):
            await self.delete_queue(name)

    @asynccontextmanager
    async def consume(
        self, queue: str, *, prefetch: int = 0, is_exclusive: bool = False
    ) -> AsyncIterator[MemoryConsumer]:
        if self._forgets(queue, "read"):
            await self.delete_queue(queue)
        async with super().consume(queue, prefetch=prefetch, is_exclusive=is_exclusive) as it:
            if self._forgets(queue, "attached"):
                await self.delete_queue(queue)
            yield it

    def _forgets(self, queue: str, moment: str) -> bool:
        is_now = queue.startswith("reply.chat") and moment == self._moment and self._num_left > 0
        self._num_left -= is_now
        return is_now


MOMENTS = ["declared", "written", "accepted", "read", "attached"]


@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_request_whose_log_is_deleted_while_it_begins_is_begun_again(
    moment: str, broker: MemoryBroker, worker: ScriptedWorker
) -> None:
    async with ForgetfulBus(broker, moment, 1) as bus, live_gateway(bus) as gateway:
        answer, again = [await ask(gateway) for _ in range(2)]

    assert answer.status_code == 200
    assert again.text == answer.text
    assert len(worker.jobs) == 1


@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_request_whose_logs_are_all_deleted_is_to_be_sent_again(
    moment: str, broker: MemoryBroker, worker: ScriptedWorker
) -> None:
    async with ForgetfulBus(broker, moment, 1000) as bus, live_gateway(bus) as gateway:
        answer = await ask(gateway)

    assert (answer.status_code, code_of(answer)) == (503, "service_unavailable")
    assert answer.headers["retry-after"]
    assert all([await job.is_unread() for job in worker.jobs])


class DeafBus(MemoryBus):
    """Refuses commands to gateways, as a broker does while a gateway is stopped."""

    async def publish(self, binding: Binding, message: Message) -> None:
        if binding == topology.ALL_GATEWAYS:
            raise PublishRefused("a queue is full")
        await super().publish(binding, message)


async def test_a_gateway_that_hears_no_commands_does_not_fail_the_requests_of_others(
    broker: MemoryBroker, worker: ScriptedWorker
) -> None:
    async with DeafBus(broker) as bus, live_gateway(bus) as gateway:
        answer = await ask(gateway)

    assert answer.status_code == 200


async def send_late(gateway: LiveGateway) -> asyncio.StreamWriter:
    """Send what `ask` sends, and read nothing."""
    request = httpx.Request("POST", f"{gateway.url}{CHAT}", json=chat_body())
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: {request.url.host}\r\nidempotency-key: {KEY}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(request.content)}\r\n\r\n"
    )
    _, writer = await asyncio.open_connection(request.url.host, request.url.port)
    writer.write(head.encode() + request.content)
    return writer


@pytest.mark.parametrize("has_left", [True, False])
async def test_an_abandoned_request_that_comes_after_its_retry_does_not_cost_it_the_answer(
    has_left: bool, broker: MemoryBroker, worker: ScriptedWorker
) -> None:
    """The slow gateway learns that its client has left, or it takes over and the retry retries."""
    may_end = wait_before_the_end(worker)
    async with two_gateways(broker) as (slow, gateway):
        client = gateway.openai.with_options(max_retries=2)
        retry = asyncio.create_task(
            client.chat.completions.create(**chat_body(), extra_headers={"idempotency-key": KEY})
        )
        await worker.wait_until(lambda: bool(worker.jobs))
        abandoned = await send_late(slow)
        if has_left:
            abandoned.close()

        async def is_retry_cut_off() -> bool:
            return await gateway.sample("warren_gateway_errors_total") == 1

        if has_left:
            await asyncio.sleep(0.3)
        else:
            await eventually(is_retry_cut_off)
        was_cut_off = await is_retry_cut_off()
        may_end.set()
        answer = await retry
        abandoned.close()

    assert was_cut_off != has_left
    assert answer.choices[0].message.content == "done"
    assert len(worker.jobs) == 1
