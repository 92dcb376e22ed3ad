"""The broker's node that keeps a log dies, maybe for good, and no stream ends with it."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest

from gateway.log import stalls
from shared import topology
from shared.bus.base import Binding, Exchange, Message, Queue, QueueState
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.errors import PublishUnconfirmed, Unanswered
from shared.messages import Restored, decode_event
from tests.support.engines.brake import Brake
from tests.support.gateway.http import (
    SECRET,
    LiveGateway,
    events,
    eventually,
    live_gateway,
    two_gateways,
)
from tests.support.workers.jobs import num_ready, wait_answered, wait_consumers
from tests.support.workers.synthetic import echo_worker
from worker.jobs import delivery

NUM_TOKENS = 60
NUM_FIRST_STEPS = 11
"""A worker's engine then stands still in the middle of an answer until the test has acted."""
STEP_S = 0.005
HAS_IDS = {"accept": "text/event-stream"}


def question(**more: Any) -> dict[str, Any]:
    return {
        "model": "echo",
        "prompt": "one two three",
        "max_tokens": NUM_TOKENS,
        "seed": 7,
        "temperature": 1.0,
        "stream": True,
        "ignore_eos": True,
        **more,
    }


def words_of(body: str, choice: int = 0) -> str:
    *chunks, done = events(body)
    assert done == "[DONE]", done
    choices = [one for chunk in chunks for one in chunk["choices"]]
    return "".join(one["text"] for one in choices if one["index"] == choice)


async def undisturbed(broker: MemoryBroker, gateway: LiveGateway, **more: Any) -> str:
    """The answer of a worker that is there for this request only."""
    async with echo_worker(broker):
        return (await gateway.post("/v1/completions", **question(**more))).text


@asynccontextmanager
async def asking(
    gateway: LiveGateway, key: str | None = None, **more: Any
) -> AsyncIterator[httpx.Response]:
    headers = HAS_IDS if key is None else {**HAS_IDS, "idempotency-key": key}
    async with gateway.http.stream(
        "POST", "/v1/completions", json=question(**more), headers=headers
    ) as response:
        yield response


async def resume(gateway: LiveGateway, response: httpx.Response, body: str) -> httpx.Response:
    """Ask for what follows the part ``body`` of a response."""
    *_, last_id = (line[4:] for line in body.splitlines() if line.startswith("id: "))
    url = f"/v1/streams/{response.headers['x-request-id']}"
    return await gateway.http.get(url, headers={"last-event-id": last_id})


async def wait_recreated(broker: MemoryBroker, log: str) -> None:
    """Wait until the log that follows a lost log is there."""

    async def is_there() -> bool:
        return await bus.inspect(topology.later_log(log) or "") is not None

    async with MemoryBus(broker) as bus:
        await eventually(is_there)


async def wait_unread(broker: MemoryBroker, log: str) -> None:
    """Wait until the gateway has noticed that the log's client has left."""
    async with MemoryBus(broker) as bus:
        await wait_consumers(bus, log, 0)


def log_of(response: httpx.Response) -> str:
    return topology.reply_key(response.headers["x-request-id"])


@pytest.mark.parametrize("num_choices", [1, 2])
async def test_a_stream_goes_on_in_another_log(num_choices: int) -> None:
    broker, brake = MemoryBroker(), Brake(NUM_FIRST_STEPS)
    async with MemoryBus(broker) as bus, live_gateway(bus) as gateway:
        expected = await undisturbed(broker, gateway, n=num_choices)
        async with (
            echo_worker(broker, step_s=STEP_S, brake=brake),
            asking(gateway, n=num_choices) as response,
        ):
            pieces = response.aiter_text()
            body = await anext(pieces)
            broker.take_down(log_of(response))
            brake.release()
            body += "".join([piece async for piece in pieces])
        later = topology.later_log(log_of(response))
        assert later is not None

        async def is_gone() -> bool:
            return await bus.inspect(later) is None

        await eventually(is_gone)

    for choice in range(num_choices):
        assert words_of(body, choice) == words_of(expected, choice)


async def test_nodes_die_one_after_the_other_and_return() -> None:
    broker = MemoryBroker()
    async with MemoryBus(broker) as bus, live_gateway(bus) as gateway:
        expected = await undisturbed(broker, gateway)
        async with echo_worker(broker, step_s=STEP_S), asking(gateway) as response:
            log, body, num_deaths = log_of(response), "", 0
            async for piece in response.aiter_text():
                body += piece
                if num_deaths < 3 and await bus.inspect(log) is not None:
                    num_deaths += 1
                    broker.take_down(log)
                    asyncio.get_running_loop().call_later(0.05, broker.bring_back, log)
                    log = topology.later_log(log) or ""

    assert words_of(body) == words_of(expected)


async def test_a_job_that_no_worker_has_started_is_answered_in_the_other_log() -> None:
    broker = MemoryBroker()
    async with live_gateway(broker, first_event_timeout_s=0.05) as gateway:
        expected = await undisturbed(broker, gateway)
        async with asking(gateway) as response:
            broker.take_down(log_of(response))
            async with echo_worker(broker):
                body = (await response.aread()).decode()

    assert words_of(body) == words_of(expected)


async def test_the_end_of_an_answer_that_is_lost_with_its_log_is_generated_again() -> None:
    broker, brake = MemoryBroker(), Brake(NUM_FIRST_STEPS)
    async with (
        MemoryBus(broker) as bus,
        MemoryBus(broker) as theirs,
        live_gateway(bus) as gateway,
    ):
        expected = await undisturbed(broker, gateway)
        async with (
            echo_worker(theirs, step_s=STEP_S, brake=brake),
            asking(gateway) as response,
        ):
            pieces = response.aiter_text()
            body = await anext(pieces)
            await lose_with_its_end_unread(broker, bus, theirs, log_of(response), brake)
            body += "".join([piece async for piece in pieces])

    assert words_of(body) == words_of(expected)


async def lose_with_its_end_unread(
    broker: MemoryBroker, bus: MemoryBus, theirs: MemoryBus, log: str, brake: Brake
) -> None:
    """Disconnect a gateway until the worker has answered its job and the log of this job is
    lost."""
    bus.sever(for_s=math.inf)
    brake.release()
    await wait_answered(theirs, 1)
    broker.take_down(log)
    bus.sever()


@pytest.mark.parametrize("is_at_once", [True, False])
async def test_a_client_that_resumes_at_that_moment_waits(is_at_once: bool) -> None:
    broker, brake = MemoryBroker(), Brake(NUM_FIRST_STEPS)
    async with two_gateways(broker) as (first, second):
        expected = await undisturbed(broker, first)
        async with (
            echo_worker(broker, step_s=STEP_S, brake=brake),
            asking(first) as response,
        ):
            body = await anext(response.aiter_text())
            broker.take_down(log_of(response))
            brake.release()
            if not is_at_once:
                await asyncio.sleep(0.1)
            rest = await resume(second, response, body)

    assert rest.status_code == 200
    assert words_of(body + rest.text) == words_of(expected)


async def test_a_log_without_a_reader_is_there_again_with_its_node() -> None:
    broker, brake = MemoryBroker(), Brake(NUM_FIRST_STEPS)
    async with two_gateways(broker) as (first, second), AsyncExitStack() as stack:
        expected = await undisturbed(broker, first)
        await stack.enter_async_context(echo_worker(broker, step_s=STEP_S, brake=brake))
        async with asking(first) as response:
            body = await anext(response.aiter_text())
            log = log_of(response)
        await wait_unread(broker, log)
        broker.take_down(log)
        brake.release()
        resuming = asyncio.create_task(resume(second, response, body))
        await asyncio.sleep(0.1)
        was_waiting = not resuming.done()
        broker.bring_back(log)
        rest = await resuming

    assert was_waiting
    assert words_of(body + rest.text) == words_of(expected)


async def test_a_job_is_not_cancelled_while_its_client_waits_for_a_node() -> None:
    broker, brake = MemoryBroker(), Brake(NUM_FIRST_STEPS)
    async with two_gateways(broker) as (first, second), AsyncExitStack() as stack:
        expected = await undisturbed(broker, first)
        worker = echo_worker(broker, step_s=STEP_S, brake=brake, reader_grace_s=0.1)
        await stack.enter_async_context(worker)
        async with asking(first) as response:
            body = await anext(response.aiter_text())
            log = log_of(response)
            broker.take_down(log)
            brake.release()
        resuming = asyncio.create_task(resume(second, response, body))
        await asyncio.sleep(3)
        broker.bring_back(log)
        rest = await resuming

    assert words_of(body + rest.text) == words_of(expected)


async def test_a_job_waits_for_the_node_of_its_log_as_long_as_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delivery, "_DOWN_PATIENCE_S", 0.3)
    broker, brake = MemoryBroker(), Brake(NUM_FIRST_STEPS)
    async with two_gateways(broker) as (first, second), AsyncExitStack() as stack:
        expected = await undisturbed(broker, first)
        await stack.enter_async_context(echo_worker(broker, step_s=STEP_S, brake=brake))
        async with asking(first, detach=True) as response:
            body = await anext(response.aiter_text())
            log = log_of(response)
        await wait_unread(broker, log)
        broker.take_down(log)
        brake.release()
        await asyncio.sleep(2)
        broker.bring_back(log)
        rest = await resume(second, response, body)

    assert words_of(body + rest.text) == words_of(expected)


async def test_a_resumed_stream_waits_for_its_node_if_nobody_can_write_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stalls, "STRANDED_S", 0.5)
    broker, brake = MemoryBroker(), Brake(NUM_FIRST_STEPS)
    async with (
        MemoryBus(broker) as bus,
        MemoryBus(broker) as theirs,
        live_gateway(broker) as first,
        live_gateway(bus) as second,
        AsyncExitStack() as stack,
    ):
        expected = await undisturbed(broker, first)
        await stack.enter_async_context(echo_worker(theirs, step_s=STEP_S, brake=brake))
        async with asking(first, detach=True) as response:
            body = await anext(response.aiter_text())
            log = log_of(response)
        url = f"/v1/streams/{response.headers['x-request-id']}"
        async with second.http.stream("GET", url) as resumed:
            pieces = resumed.aiter_text()
            await anext(pieces)
            await lose_with_its_end_unread(broker, bus, theirs, log, brake)
            cut = "".join([piece async for piece in pieces])
        await theirs.delete_queue(topology.later_log(log) or "")  # as it expires
        broker.bring_back(log)
        rest = await resume(first, response, body)

    assert "node that stores this stream is down" in cut
    assert words_of(body + rest.text) == words_of(expected)


async def test_a_resumed_stream_waits_for_its_node_if_nobody_has_copied_its_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stalls, "STRANDED_S", 0.5)
    broker, brake = MemoryBroker(), Brake(NUM_FIRST_STEPS)
    async with (
        MemoryBus(broker) as bus,
        MemoryBus(broker) as theirs,
        live_gateway(bus) as first,
        live_gateway(broker) as second,
        AsyncExitStack() as stack,
    ):
        expected = await undisturbed(broker, second)
        await stack.enter_async_context(echo_worker(theirs, step_s=STEP_S, brake=brake))
        async with asking(first) as response:
            body = await anext(response.aiter_text())
            log = log_of(response)
            later = topology.later_log(log) or ""
            await lose_with_its_end_unread(broker, bus, theirs, log, brake)
            bus.sever(for_s=math.inf)  # it dies when it has recreated the log
            await theirs.declare(topology.reply_queue(later.removeprefix("reply."), 60))
            refused = await resume(second, response, body)
            await theirs.delete_queue(later)  # as it expires
            broker.bring_back(log)
            rest = await resume(second, response, body)
        bus.sever()

    assert refused.status_code == 503
    assert words_of(body + rest.text) == words_of(expected)


class BusyBus(MemoryBus):
    """Cannot be asked once how the broker is."""

    is_free = False

    async def inspect(self, queue: str) -> QueueState | None:
        if queue == topology.DEAD_LETTERS.name and not self.is_free:
            self.is_free = True
            raise Unanswered("busy")
        return await super().inspect(queue)


async def test_a_job_that_waits_is_published_once_more_when_its_log_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stalls, "_DESERTED_S", 0.1)
    broker, queue = MemoryBroker(), topology.jobs_queue("echo", "interactive")

    async def is_published_again() -> bool:
        return await num_ready(bus, queue.name) >= 2

    async with BusyBus(broker) as bus, live_gateway(bus, first_event_timeout_s=0.05) as gateway:
        await undisturbed(broker, gateway)
        async with asking(gateway) as response:
            broker.take_down(log_of(response))
            await eventually(is_published_again)
            await asyncio.sleep(stalls.LOOK_INTERVAL_S * 3)
            num_published = await num_ready(bus, queue.name)

    assert num_published == 2


class SlowBus(MemoryBus):
    """Takes its time to declare logs that were lost."""

    async def declare(self, *resources: Exchange | Queue) -> None:
        if any(topology.first_log(resource.name) != resource.name for resource in resources):
            await asyncio.sleep(0.5)
        await super().declare(*resources)


async def test_a_reader_keeps_what_it_has_read_until_the_log_is_there_again() -> None:
    broker, brake = MemoryBroker(), Brake(NUM_FIRST_STEPS)
    options = {"secret": SECRET, "disconnect_grace_s": 60}
    async with (
        SlowBus(broker) as slow,
        live_gateway(slow, **options) as first,
        live_gateway(broker, **options) as second,
    ):
        expected = await undisturbed(broker, first)
        async with (
            echo_worker(broker, step_s=STEP_S, brake=brake),
            asking(first) as response,
        ):
            body = await anext(response.aiter_text())
            broker.take_down(log_of(response))
            brake.release()
            rest = await resume(second, response, body)

    assert words_of(body + rest.text) == words_of(expected)


class LossyBus(MemoryBus):
    """Declares logs that were lost when it may, and loses the first copy of a log on its way to the
    broker."""

    has_lost = False

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker)
        self.is_declaring, self.may_declare = asyncio.Event(), asyncio.Event()

    async def declare(self, *resources: Exchange | Queue) -> None:
        if any(topology.first_log(resource.name) != resource.name for resource in resources):
            self.is_declaring.set()
            await self.may_declare.wait()
        await super().declare(*resources)

    async def publish(self, binding: Binding, message: Message) -> None:
        is_copy = binding.exchange == topology.REPLIES and isinstance(
            decode_event(message.body), Restored
        )
        if is_copy and not self.has_lost:
            self.has_lost = True
            raise PublishUnconfirmed("no confirmation in time")
        await super().publish(binding, message)


@pytest.mark.parametrize("has_left", [False, True])
async def test_a_client_that_returns_to_its_gateway_does_not_end_the_only_copy(
    has_left: bool,
) -> None:
    broker, brake = MemoryBroker(), Brake(NUM_FIRST_STEPS)
    async with (
        LossyBus(broker) as lossy,
        live_gateway(lossy, secret=SECRET, disconnect_grace_s=60) as gateway,
    ):
        expected = await undisturbed(broker, gateway)
        async with (
            echo_worker(broker, step_s=STEP_S, brake=brake),
            asking(gateway) as response,
        ):
            pieces = response.aiter_text()
            body = await anext(pieces)
            broker.take_down(log_of(response))
            brake.release()
            await lossy.is_declaring.wait()
            if has_left:
                await response.aclose()
            resuming = asyncio.create_task(resume(gateway, response, body))
            if not has_left:
                await asyncio.wait([resuming])
            lossy.may_declare.set()
            refused = rest = await resuming
            while rest.status_code == 503:
                await asyncio.sleep(0.1)
                rest = await resume(gateway, response, body)

    assert refused.status_code == (200 if has_left else 503)
    assert lossy.has_lost
    assert words_of(body + rest.text) == words_of(expected)


async def test_a_stream_whose_log_was_lost_can_be_cancelled() -> None:
    broker, brake = MemoryBroker(), Brake(NUM_FIRST_STEPS)
    async with (
        two_gateways(broker) as (first, second),
        echo_worker(broker, step_s=STEP_S, brake=brake),
        asking(first) as response,
    ):
        log = log_of(response)
        await anext(response.aiter_text())
        broker.take_down(log)
        brake.allow(1)
        await wait_recreated(broker, log)
        url = f"/v1/streams/{response.headers['x-request-id']}"
        cancelled = await second.http.delete(url)

    assert cancelled.status_code == 200


async def test_a_job_finds_its_log_although_the_first_one_has_returned_and_expired(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stalls, "_DESERTED_S", 60.0)  # the gateway must not have to help
    broker, brake = MemoryBroker(), Brake(NUM_FIRST_STEPS)
    async with MemoryBus(broker) as bus, live_gateway(bus) as gateway:
        expected = await undisturbed(broker, gateway)
        async with asking(gateway) as response:
            pieces = response.aiter_text()
            async with echo_worker(broker, brake=brake, drain_grace_s=0.1):
                body = await anext(pieces)
                log = log_of(response)
                broker.take_down(log)
                brake.allow(1)
                await wait_recreated(broker, log)
                broker.bring_back(log)
                await bus.delete_queue(log)
            async with echo_worker(broker, step_s=STEP_S):
                body += "".join([piece async for piece in pieces])

    assert words_of(body) == words_of(expected)
    assert "worker silent, job published again" not in caplog.messages


async def test_a_request_that_is_repeated_with_its_key_finds_the_recreated_log() -> None:
    broker, brake = MemoryBroker(), Brake(NUM_FIRST_STEPS)
    async with two_gateways(broker) as (first, second), AsyncExitStack() as stack:
        expected = await undisturbed(broker, first)
        await stack.enter_async_context(echo_worker(broker, step_s=STEP_S, brake=brake))
        async with asking(first, key="key") as response:
            log = log_of(response)
            await anext(response.aiter_text())
            broker.take_down(log)
            brake.allow(1)
            await wait_recreated(broker, log)
        brake.release()
        async with asking(second, key="key") as response:
            body = (await response.aread()).decode()

    assert words_of(body) == words_of(expected)
