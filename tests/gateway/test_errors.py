"""Errors, as OpenAI's clients see them."""

import gzip
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from gateway.intake.keys.key_file import KeyFile
from shared.bus.memory import MemoryBroker, MemoryBus
from tests.support.gateway.http import LiveGateway, chat_body, events, hears_a_worker, live_gateway
from tests.support.workers.scripted_worker import MODEL, ScriptedJob, ScriptedWorker

JSON = {"content-type": "application/json"}
CHAT = "/v1/chat/completions"


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error, which has its four keys, and a request id beside it."""
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert all(isinstance(error[key], str | None) for key in ("param", "code"))
    assert response.headers["x-request-id"]
    return error


async def test_a_bad_parameter_is_a_bad_request(gateway: LiveGateway) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await gateway.openai.completions.create(model="scripted", prompt="x", temperature=3)

    assert caught.value.param == "temperature"
    assert caught.value.type == "invalid_request_error"


async def test_a_bad_request_reaches_no_queue(gateway: LiveGateway, worker: ScriptedWorker) -> None:
    await gateway.chat(temperature=3)
    await gateway.chat()

    assert len(worker.jobs) == 1


async def test_an_unknown_path_is_named(gateway: LiveGateway) -> None:
    response = await gateway.http.post(f"/v1/chat/completion{'s' * 999}", json=chat_body())

    error = error_of(response)
    assert (response.status_code, error["code"]) == (404, "not_found")
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("Unknown path: POST /v1/chat/completions")
    assert "/docs" in error["message"]
    assert len(error["message"]) < 250


async def test_an_unknown_model_is_not_found(gateway: LiveGateway) -> None:
    await hears_a_worker(gateway)

    with pytest.raises(openai.NotFoundError) as caught:
        await gateway.openai.completions.create(model="gpt-5", prompt="x")

    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert f"'gpt-5' does not exist. Available models: '{MODEL}'." in caught.value.message


async def test_only_models_that_a_key_may_use_are_named(
    bus: MemoryBus, worker: ScriptedWorker, tmp_path: Path
) -> None:
    keys = KeyFile(tmp_path / "keys")
    key = keys.add("alice", models=("mine-*",))
    async with live_gateway(bus, keys_file=keys.path) as gateway:
        headers = {"authorization": f"Bearer {key}"}
        response = await gateway.http.post(CHAT, json=chat_body(), headers=headers)

    assert response.status_code == 404
    assert "access to it." in error_of(response)["message"]
    assert "Available" not in error_of(response)["message"]


async def test_an_unknown_model_is_not_found_although_it_would_call_tools(
    gateway: LiveGateway,
) -> None:
    tool = {"type": "function", "function": {"name": "look_up"}}

    response = await gateway.chat(model="gpt-5", tools=[tool])

    assert response.status_code == 404
    assert error_of(response)["code"] == "model_not_found"


async def test_bodies_that_are_no_json_are_bad_requests(gateway: LiveGateway) -> None:
    for body in (b"", b"{", b"\xff\xfe", b"[" * 100_000, b"null"):
        response = await gateway.http.post(CHAT, content=body, headers=JSON)

        assert response.status_code == 400
        assert error_of(response)["code"] == "invalid_request"


async def test_other_content_types_are_refused(gateway: LiveGateway) -> None:
    types = "text/plain", "multipart/form-data", "application/x-www-form-urlencoded"
    for headers in ({}, *({"content-type": name} for name in types)):
        response = await gateway.http.post(CHAT, content=b"{}", headers=headers)

        assert response.status_code == 415
        assert "application/json" in error_of(response)["message"]


async def test_a_compressed_body_is_refused(gateway: LiveGateway) -> None:
    response = await gateway.http.post(
        CHAT, content=gzip.compress(b"{}"), headers={**JSON, "content-encoding": "gzip"}
    )

    assert response.status_code == 415
    error_of(response)


async def test_a_body_beyond_the_limit_is_refused_with_and_without_its_length(
    bus: MemoryBus, worker: ScriptedWorker
) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 100

    async with live_gateway(bus, max_body_bytes=1000) as gateway:
        for content in (b" " * 1001, chunks()):
            response = await gateway.http.post(CHAT, content=content, headers=JSON)

            assert response.status_code == 413
            assert "1000" in error_of(response)["message"]
        assert (await gateway.chat()).status_code == 200


async def test_no_such_route_and_no_such_method_have_the_same_shape(gateway: LiveGateway) -> None:
    missing, wrong = await gateway.http.get("/v1/nothing"), await gateway.http.get(CHAT)

    assert (missing.status_code, error_of(missing)["code"]) == (404, "not_found")
    assert (wrong.status_code, error_of(wrong)["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"


async def test_a_worker_that_refuses_at_once_decides_the_status(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    async def refuse(job: ScriptedJob) -> None:
        job.log.attempt = 0
        await job.fail("context_length_exceeded", "Too long.", "messages")

    worker.script = refuse

    for stream in (True, False):
        response = await gateway.chat(stream=stream)
        assert response.status_code == 400
        error = error_of(response)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


async def test_a_failure_after_the_first_token_is_the_streams_last_event(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    async def say_and_fail(job: ScriptedJob) -> None:
        await job.start()
        await job.say("one")
        while len(worker.jobs) < 2:  # the stream has begun when the second job is sent
            await worker.wait_until(lambda: len(worker.jobs) > 1)
        await job.fail("worker_lost", "The worker was lost.")

    worker.script = say_and_fail
    stream = await gateway.openai.completions.create(model="scripted", prompt="x", stream=True)
    pieces = [(await anext(aiter(stream))).choices[0].text]
    await gateway.chat()

    with pytest.raises(openai.APIError, match="The worker was lost") as caught:
        pieces += [chunk.choices[0].text async for chunk in stream]

    assert pieces == ["one"]
    assert caught.value.code == "worker_lost"


async def test_a_failed_stream_is_not_done(gateway: LiveGateway, worker: ScriptedWorker) -> None:
    async def fail_in_the_middle(job: ScriptedJob) -> None:
        await job.start()
        await job.say("one", 0)
        await job.finish("end", 0)
        await worker.wait_until(lambda: len(worker.jobs) > 1)
        await job.fail("internal_error", "Sorry.")

    worker.script = fail_in_the_middle
    body = {"model": "scripted", "prompt": ["x", "y"], "stream": True}
    async with gateway.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.aiter_lines()
        text = [await anext(lines)]
        worker.script = ScriptedJob.start  # the second job ends with its first word
        async with gateway.http.stream("POST", CHAT, json=chat_body(stream=True)):
            text += [line async for line in lines]

    *_, last = events("\n".join(text))
    assert last == {
        "error": {
            "message": "Sorry.",
            "type": "server_error",
            "param": None,
            "code": "internal_error",
        }
    }


async def test_a_broker_that_is_away_is_a_503_that_says_when_to_come_back(
    broker: MemoryBroker,
) -> None:
    never_opened = MemoryBus(broker)

    async with live_gateway(never_opened) as gateway:
        response = await gateway.chat()

    assert response.status_code == 503
    assert error_of(response)["code"] == "broker_unavailable"
    assert error_of(response)["message"] == "The broker is unreachable."
    assert response.headers["retry-after"] == "1"
    assert response.headers["retry-after-ms"] == "1000"
