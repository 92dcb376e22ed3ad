"""GET /v1/models, and which models there are."""

import asyncio
from typing import Any

import msgspec
import openai
import pytest

from shared import topology
from shared.bus.memory import MemoryBus
from tests.support.gateway.http import LiveGateway, eventually, hears_a_worker, live_gateway
from tests.support.workers.jobs import num_ready
from tests.support.workers.scripted_worker import MODEL, ScriptedJob, ScriptedWorker

TRAITS: dict[str, Any] = {
    "engine": "trtllm 1.2",
    "unsupported": ("top_k", "min_p", "constraint"),
    "engine_constraints": ("json_schema",),
}
"""What the worker of another engine announces."""
USER = {"role": "user", "content": "one"}


async def test_announced_models_are_listed(gateway: LiveGateway) -> None:
    async def is_listed() -> bool:
        return [model.id for model in (await gateway.openai.models.list()).data] == [MODEL]

    await eventually(is_listed)


async def test_a_model_is_described(gateway: LiveGateway) -> None:
    async def is_known() -> bool:
        return (await gateway.http.get(f"/v1/models/{MODEL}")).status_code == 200

    await eventually(is_known)

    model = (await gateway.http.get(f"/v1/models/{MODEL}")).json()
    assert (model["object"], model["owned_by"], model["max_model_len"]) == ("model", "warren", 2048)
    assert model["fingerprint"] == "f"
    assert isinstance(model["created"], int)


async def hears_traits(gateway: LiveGateway, worker: ScriptedWorker) -> None:
    """Let the worker announce `TRAITS`, and wait until the gateway knows."""
    worker.announcement = msgspec.structs.replace(worker.announcement, **TRAITS)

    async def is_known() -> bool:
        answer = await gateway.http.get(f"/v1/models/{MODEL}")
        return answer.status_code == 200 and answer.json()["engine"] == TRAITS["engine"]

    await eventually(is_known)


async def test_a_model_of_another_engine_has_that_engines_traits(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    await hears_traits(gateway, worker)

    model = (await gateway.http.get(f"/v1/models/{MODEL}")).json()
    assert model["max_num_seqs"] == 8
    assert model["unsupported_parameters"] == ["constraint", "min_p", "top_k"]
    assert model["engine_constraints"] == ["json_schema"]


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ({"top_k": 5}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
    ids=["top_k", "min_p", "response_format"],
)
async def test_what_the_engine_lacks_is_refused_before_any_work(
    gateway: LiveGateway, worker: ScriptedWorker, field: dict[str, Any], param: str
) -> None:
    await hears_traits(gateway, worker)

    body = {"model": MODEL, "messages": [USER], **field}
    answer = await gateway.http.post("/v1/chat/completions", json=body)

    error = answer.json()["error"]
    assert (answer.status_code, error["param"], worker.jobs) == (400, param, [])
    assert "trtllm 1.2" in error["message"]


@pytest.mark.parametrize("body", [{}, {"model": None}, {"model": ""}])
async def test_a_request_that_names_no_model_is_the_only_ones(
    gateway: LiveGateway, worker: ScriptedWorker, body: dict[str, Any]
) -> None:
    await hears_a_worker(gateway)

    chat = await gateway.http.post("/v1/chat/completions", json={"messages": [USER], **body})
    response = await gateway.http.post("/v1/responses", json={"input": "one", **body})

    assert [chat.json()["model"], response.json()["model"]] == [MODEL, MODEL]


async def test_a_request_that_names_no_model_is_refused_if_there_is_none(bus: MemoryBus) -> None:
    async with live_gateway(bus) as gateway:
        response = await gateway.http.post("/v1/chat/completions", json={"messages": [USER]})

    assert (response.status_code, response.json()["error"]["param"]) == (400, "model")


async def test_a_model_that_nobody_serves_is_not_found(gateway: LiveGateway) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await gateway.openai.models.retrieve("meta/llama")

    assert caught.value.code == "model_not_found"


async def test_a_known_model_without_a_worker_queues_until_there_is_one(
    bus: MemoryBus, worker_bus: MemoryBus
) -> None:
    await bus.declare(topology.jobs_queue(MODEL, "interactive"))

    async def say_yes(job: ScriptedJob) -> None:
        await job.start()
        await job.finish("yes")

    async with live_gateway(bus) as gateway:
        asking = asyncio.create_task(gateway.chat())

        async def is_queued() -> bool:
            return await num_ready(bus, topology.jobs_queue(MODEL, "interactive").name) == 1

        await eventually(is_queued)
        async with ScriptedWorker(worker_bus, say_yes):
            answer = (await asking).json()

    assert answer["choices"][0]["message"]["content"] == "yes"
