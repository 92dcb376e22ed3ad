"""Operators who remove bindings and exchanges of a running deployment, with the shipped
permissions."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from shared import topology
from shared.bus.base import Queue
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.bus.rabbit import RabbitBus
from tests.shared.bus.wires import operating
from tests.support.deployment.broker import Broker
from tests.support.engines.brake import Brake
from tests.support.gateway.http import LiveGateway, eventually, hears_a_worker, live_gateway
from tests.support.workers.synthetic import echo_worker

MODEL = "echo"
BODY = {"model": MODEL, "prompt": "Who is there?", "max_tokens": 4, "seed": 7}
LANES = [topology.jobs_queue(MODEL, lane) for lane in topology.DECLARED_LANES]


@asynccontextmanager
async def deployment(broker: Broker) -> AsyncIterator[LiveGateway]:
    async with (
        RabbitBus(broker.url_of("gateway")) as gateway_bus,
        RabbitBus(broker.url_of("worker")) as worker_bus,
        live_gateway(gateway_bus) as gateway,
        echo_worker(worker_bus),
    ):
        await hears_a_worker(gateway)
        yield gateway


async def complete(gateway: LiveGateway) -> dict[str, Any]:
    answer = await gateway.post("/v1/completions", **BODY)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@pytest.mark.rabbit
async def test_requests_are_answered_although_all_bindings_of_the_model_are_gone(
    broker: Broker,
) -> None:
    async with deployment(broker) as gateway:
        async with operating(broker.url) as operator:
            for queue in LANES:
                for binding in queue.bindings:
                    key = binding.routing_key
                    await operator.queue_unbind(queue.name, binding.exchange.name, key)

        answers = await asyncio.gather(*(complete(gateway) for _ in range(4)))
        quick = await gateway.post("/v1/embeddings", model=MODEL, input="text")

        assert all(answer["usage"]["completion_tokens"] == 4 for answer in answers)
        assert quick.status_code != 404
        assert await gateway.sample("warren_topology_losses_total") > 0


@pytest.mark.rabbit
async def test_requests_are_answered_once_deleted_exchanges_are_imported_again(
    broker: Broker,
) -> None:
    async with deployment(broker) as gateway:
        await complete(gateway)
        async with operating(broker.url) as operator:
            for exchange in topology.EXCHANGES:
                await operator.exchange_delete(exchange.name)
            for exchange in topology.EXCHANGES:
                kind = exchange.kind
                await operator.exchange_declare(exchange.name, exchange_type=kind, durable=True)

        answers = await asyncio.gather(*(complete(gateway) for _ in range(12)))

        assert all(answer["usage"]["completion_tokens"] == 4 for answer in answers)


async def test_a_stream_goes_on_when_its_log_is_bound_again() -> None:
    broker = MemoryBroker()
    body = {**BODY, "max_tokens": 40, "stream": True}
    async with (
        MemoryBus(broker) as bus,
        live_gateway(broker) as gateway,
        echo_worker(bus, step_s=0.02),
    ):
        await hears_a_worker(gateway)
        expected = await streamed(gateway, body)
        async with gateway.http.stream("POST", "/v1/completions", json=body) as response:
            pieces = response.aiter_text()
            first = await anext(pieces)
            broker.delete_exchange(topology.REPLIES.name)
            await bus.declare(topology.REPLIES)
            rest = [piece async for piece in pieces]

    assert text_of(first + "".join(rest)) == expected


async def test_a_log_that_lost_its_binding_while_nobody_read_it_is_bound_by_its_next_reader() -> (
    None
):
    brake = Brake(4)  # or the answer may have ended before its client leaves
    broker = MemoryBroker()
    options = {"secret": "a secret that all gateways share", "disconnect_grace_s": 60}
    body = {**BODY, "max_tokens": 40, "stream": True}
    async with (
        MemoryBus(broker) as bus,
        live_gateway(broker, **options) as gateway,
        live_gateway(broker, **options) as other,
        echo_worker(bus, brake=brake, disconnect_grace_s=60),
    ):
        await hears_a_worker(gateway)
        async with gateway.http.stream("POST", "/v1/completions", json=body) as response:
            await anext(response.aiter_text())
            name = response.headers["x-request-id"]
        log = topology.reply_queue(name, 60)

        async def is_left() -> bool:
            state = await bus.inspect(log.name)
            return state is not None and not state.num_consumers

        await eventually(is_left)
        broker.unbind(log.name)
        brake.release()
        resumed = await other.http.get(f"/v1/streams/{name}")

    assert resumed.status_code == 200
    assert "[DONE]" in resumed.text


async def streamed(gateway: LiveGateway, body: dict[str, Any]) -> str:
    return text_of((await gateway.post("/v1/completions", **body)).text)


def text_of(stream: str) -> str:
    lines = [line.removeprefix("data: ") for line in stream.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return "".join(
        choice["text"]
        for line in lines[:-1]
        if line.startswith("{")
        for choice in json.loads(line)["choices"]
    )


async def test_a_model_whose_queue_is_not_bound_and_has_no_worker_is_unavailable() -> None:
    broker = MemoryBroker()
    queue: Queue = topology.jobs_queue("m", "interactive")
    async with MemoryBus(broker) as bus, live_gateway(broker) as gateway:
        await bus.declare(queue)
        broker.unbind(queue.name)

        answer = await gateway.post("/v1/completions", model="m", prompt="Who is there?")

    assert answer.status_code == 503
    assert "binding" in answer.json()["error"]["message"]
