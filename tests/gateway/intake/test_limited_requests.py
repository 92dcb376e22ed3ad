"""What the limits of an API key mean for its requests."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from msgspec import structs

from gateway.intake.keys.key_file import KeyFile
from shared import topology
from shared.bus.base import Message
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.messages import (
    ChatPrompt,
    Embedded,
    EmbeddingJob,
    Failed,
    Logprob,
    PromptScores,
    QuickAnswer,
    QuickJob,
    TokenLogprobs,
    encode,
)
from tests.support.gateway.http import (
    LiveGateway,
    chat_body,
    eventually,
    hears_a_worker,
    live_gateway,
    two_gateways,
)
from tests.support.workers.scripted_worker import (
    MODEL,
    ScriptedJob,
    ScriptedWorker,
    count_words,
    repeat_the_prompt,
    start_only,
    wait_before_the_end,
    words,
)

CHAT = "/v1/chat/completions"


@pytest.fixture
def file(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "keys")


def headers_of(file: KeyFile, **limits: Any) -> dict[str, str]:
    return {"authorization": f"Bearer {file.add('alice', **limits)}"}


async def chat(gateway: LiveGateway, headers: dict[str, str], **more: Any) -> httpx.Response:
    return await gateway.http.post(CHAT, json=chat_body(**more), headers=headers)


async def test_every_answer_says_what_is_left_and_a_refusal_when_there_is_more(
    broker: MemoryBroker, worker: ScriptedWorker, file: KeyFile
) -> None:
    headers = headers_of(file, requests_per_minute=2, tokens_per_minute=1000)
    async with two_gateways(broker, keys_file=file.path) as (first, second):
        answers = [await chat(one, headers, max_tokens=10) for one in (first, second, first)]
        listed = await second.http.get("/v1/models", headers=headers)

    assert [one.status_code for one in answers] == [200, 200, 429]
    assert [one.headers["x-ratelimit-remaining-requests"] for one in answers] == ["1", "0", "0"]
    assert answers[0].headers["x-ratelimit-limit-requests"] == "2"
    assert answers[0].headers["x-ratelimit-reset-requests"].endswith("s")
    assert listed.headers["x-ratelimit-limit-tokens"] == "1000"
    assert 0 < int(listed.headers["x-ratelimit-remaining-tokens"]) < 1000
    error = answers[2].json()["error"]
    assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
    assert 30 < int(answers[2].headers["retry-after"]) <= 61


async def test_the_id_of_a_refused_request_is_no_other_requests(
    bus: MemoryBus, worker: ScriptedWorker, file: KeyFile
) -> None:
    limited = headers_of(file, requests_per_minute=1)
    other = {"authorization": f"Bearer {file.add('bob')}"}
    async with live_gateway(bus, keys_file=file.path) as gateway:
        answers = [await chat(gateway, headers) for headers in (limited, limited, *[other] * 8)]

    assert [answer.status_code for answer in answers] == [200, 429, *[200] * 8]
    assert len({answer.headers["x-request-id"] for answer in answers}) == 10


async def test_a_refusal_is_counted_and_logged_by_the_limit(
    bus: MemoryBus, worker: ScriptedWorker, file: KeyFile, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    headers = headers_of(file, requests_per_minute=1)
    async with live_gateway(bus, keys_file=file.path) as gateway:
        for _ in range(2):
            await chat(gateway, headers)
        metrics = (await gateway.http.get("/metrics")).text

    reason = 'reason="requests_per_minute"'
    assert f"warren_gateway_requests_refused_total{{{reason}}} 1.0" in metrics
    (refused,) = (vars(one) for one in caplog.records if one.message == "request refused")
    assert (refused["code"], refused["limit"]) == ("rate_limit_exceeded", "requests_per_minute")


async def test_tokens_that_were_not_generated_are_returned(
    bus: MemoryBus, worker: ScriptedWorker, file: KeyFile
) -> None:
    headers = headers_of(file, tokens_per_minute=110)
    async with live_gateway(bus, keys_file=file.path) as gateway:
        answers = [await chat(gateway, headers, max_tokens=100) for _ in range(2)]
        large = await chat(gateway, headers, max_tokens=200)
        last = await chat(gateway, headers, max_tokens=100)

    assert [one.status_code for one in answers] == [200, 200]
    assert (large.status_code, large.json()["error"]["param"]) == (400, "max_tokens")
    assert (last.status_code, last.json()["error"]["type"]) == (429, "tokens")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ["a", "b"]}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ],
)
async def test_the_actual_tokens_of_texts_count(
    bus: MemoryBus, worker: ScriptedWorker, file: KeyFile, path: str, body: dict[str, Any]
) -> None:
    def embed(job: QuickJob) -> QuickAnswer:
        assert isinstance(job, EmbeddingJob)
        vectors = ((1.0,),) * len(job.prompts)
        tokens = (50,) * len(job.prompts)
        return Embedded(request_id=job.request_id, vectors=vectors, num_prompt_tokens=tokens)

    worker.quick_script = embed
    headers = headers_of(file, tokens_per_minute=100)
    async with live_gateway(bus, keys_file=file.path) as gateway:
        answers = [
            await gateway.http.post(path, json={"model": MODEL, **body}, headers=headers)
            for _ in range(2)
        ]

    assert [one.status_code for one in answers] == [200, 429]
    assert answers[0].json()["usage"]["total_tokens"] == 100
    assert "Limit 100, Used 100, Requested 2" in answers[1].json()["error"]["message"]


async def test_a_request_counts_before_its_constraint_is_tried(
    bus: MemoryBus, worker: ScriptedWorker, file: KeyFile
) -> None:
    headers = headers_of(file, requests_per_minute=1)
    async with live_gateway(bus, keys_file=file.path) as gateway:
        answers = [
            await chat(gateway, headers, structured_outputs={"regex": "("}) for _ in range(2)
        ]

    assert [one.status_code for one in answers] == [400, 429]


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/input_tokens"])
async def test_nothing_is_loaded_for_a_request_that_is_out_of_the_limits(
    bus: MemoryBus, worker: ScriptedWorker, file: KeyFile, path: str
) -> None:
    headers = headers_of(file, requests_per_minute=1)
    body = {"model": MODEL, "input": "a", "conversation": f"conv_{'0' * 32}"}
    async with live_gateway(bus, keys_file=file.path) as gateway:
        await chat(gateway, headers)

        refused = await gateway.http.post(path, json=body, headers=headers)

    assert refused.status_code == 429


async def test_the_official_client_sees_a_limit_of_concurrent_requests(
    bus: MemoryBus, worker: ScriptedWorker, file: KeyFile
) -> None:
    worker.script = start_only
    headers = headers_of(file, max_concurrent=1)
    async with live_gateway(bus, keys_file=file.path) as gateway:
        running = asyncio.create_task(chat(gateway, headers))
        await worker.wait_until(lambda: bool(worker.jobs))

        with pytest.raises(
            openai.RateLimitError, match="concurrent requests of this API key: Limit 1, Used 1"
        ):
            await gateway.openai.chat.completions.create(**chat_body(), extra_headers=headers)

        running.cancel()


async def test_a_foreign_model_does_not_exist_for_a_key(
    bus: MemoryBus, worker: ScriptedWorker, file: KeyFile
) -> None:
    everything, nothing = headers_of(file), headers_of(file, models=("other", "another*"))
    async with live_gateway(bus, keys_file=file.path) as gateway:
        assert (await chat(gateway, everything)).status_code == 200
        for method, path, body in (
            ("POST", CHAT, chat_body()),
            ("POST", "/tokenize", {"model": "scripted", "prompt": "a"}),
            ("GET", "/v1/models/scripted", None),
        ):
            refused = await gateway.http.request(method, path, json=body, headers=nothing)
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                404,
                "model_not_found",
            )
        listed = await gateway.http.get("/v1/models", headers=nothing)
        assert listed.json()["data"] == []


async def test_a_keys_max_tokens_bounds_each_answer(
    bus: MemoryBus, worker: ScriptedWorker, file: KeyFile
) -> None:
    headers = headers_of(file, max_tokens=2)
    async with live_gateway(bus, keys_file=file.path) as gateway:
        unasked = await chat(gateway, headers)
        too_large = await chat(gateway, headers, max_tokens=3)

    assert unasked.json()["choices"][0]["finish_reason"] == "length"
    (job,) = worker.jobs
    assert (job.job.sampling.max_tokens, job.job.sampling.clamp_max_tokens) == (2, True)
    assert (too_large.status_code, too_large.json()["error"]["param"]) == (400, "max_tokens")


async def test_what_a_key_permits_does_not_shorten_a_conversation(
    bus: MemoryBus, worker: ScriptedWorker, file: KeyFile
) -> None:
    items = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
    body = {"model": MODEL, "input": items, "truncation": "auto"}
    headers = headers_of(file, max_tokens=1 << 20)
    async with live_gateway(bus, keys_file=file.path) as gateway:
        await gateway.http.post("/v1/responses", json=body, headers=headers)

    (prompt,) = worker.jobs[0].job.prompts
    assert isinstance(prompt, ChatPrompt)
    assert len(prompt.messages) == 3


@pytest.mark.parametrize("ending", ["answer", "cancel"])
async def test_background_work_counts_until_its_log_ends(
    bus: MemoryBus, worker: ScriptedWorker, file: KeyFile, ending: str
) -> None:
    may_end = wait_before_the_end(worker)
    headers = headers_of(file, max_detached=1)
    body = {"model": "scripted", "input": "a", "background": True}
    async with live_gateway(bus, keys_file=file.path) as gateway:

        async def begin() -> httpx.Response:
            return await gateway.http.post("/v1/responses", json=body, headers=headers)

        first, second = await begin(), await begin()
        assert (first.status_code, second.status_code) == (200, 429)
        assert "unfinished detached requests" in second.json()["error"]["message"]
        if ending == "cancel":
            await worker.wait_until(lambda: bool(worker.jobs))
            await gateway.http.delete(f"/v1/responses/{first.json()['id']}", headers=headers)
        else:
            may_end.set()

        async def is_free() -> bool:
            return (await begin()).status_code == 200

        await eventually(is_free)


async def test_a_detached_request_that_is_sent_again_takes_no_further_place(
    bus: MemoryBus, worker: ScriptedWorker, file: KeyFile
) -> None:
    may_end = wait_before_the_end(worker)
    headers = headers_of(file, max_detached=1)
    body = {"model": "scripted", "prompt": "a", "detach": True}
    async with live_gateway(bus, keys_file=file.path) as gateway:

        async def ask(key: str) -> httpx.Response:
            keyed = {**headers, "Idempotency-Key": key}
            return await gateway.http.post("/v1/completions", json=body, headers=keyed)

        first = asyncio.create_task(ask("one"))
        await worker.wait_until(lambda: bool(worker.jobs))
        again = asyncio.create_task(ask("one"))
        refused = await ask("two")
        may_end.set()
        answers = [await first, await again, await ask("one"), await ask("two")]

    assert refused.status_code == 429
    assert [answer.status_code for answer in answers[1:]] == [200, 200, 200]
    assert len(worker.jobs) == 2


async def test_another_request_under_the_key_of_a_detached_one_frees_no_place(
    bus: MemoryBus, worker: ScriptedWorker, file: KeyFile
) -> None:
    may_end = wait_before_the_end(worker)
    headers = headers_of(file, max_detached=1)
    async with live_gateway(bus, keys_file=file.path) as gateway:

        async def ask(key: str, prompt: str) -> httpx.Response:
            body = {"model": MODEL, "prompt": prompt, "detach": True}
            keyed = {**headers, "Idempotency-Key": key}
            return await gateway.http.post("/v1/completions", json=body, headers=keyed)

        first = asyncio.create_task(ask("one", "a"))
        await worker.wait_until(lambda: bool(worker.jobs))
        answers = [await ask("one", "b"), await ask("two", "a")]
        may_end.set()
        answers.append(await first)

    assert [answer.status_code for answer in answers] == [422, 429, 200]
    assert len(worker.jobs) == 1


async def test_anonymous_tenants_have_a_limit_of_detached_work(
    bus: MemoryBus, worker: ScriptedWorker
) -> None:
    worker.script = start_only
    async with live_gateway(bus, max_detached=2) as gateway:
        answers = [
            await gateway.post("/v1/responses", model="scripted", input="a", background=True)
            for _ in range(3)
        ]

    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert not any(name.startswith("x-ratelimit") for name in answers[0].headers)


async def test_tokens_of_a_request_that_failed_are_returned(
    bus: MemoryBus, worker: ScriptedWorker, file: KeyFile
) -> None:
    async def refuse(job: ScriptedJob) -> None:
        await job.start()
        await job.fail("invalid_request", "This is too long.", param="max_tokens")

    headers = headers_of(file, tokens_per_minute=110)
    async with live_gateway(bus, keys_file=file.path) as gateway:
        worker.script = refuse
        refused = await chat(gateway, headers, max_tokens=100)
        worker.script = repeat_the_prompt
        answered = await chat(gateway, headers, max_tokens=100)

    assert (refused.status_code, answered.status_code) == (400, 200)


async def test_tokens_of_texts_that_could_not_be_embedded_are_returned(
    bus: MemoryBus, worker: ScriptedWorker, file: KeyFile
) -> None:
    body = {"model": MODEL, "input": "one two three " * 20}
    headers = headers_of(file, tokens_per_minute=100)
    async with live_gateway(bus, keys_file=file.path) as gateway:
        worker.quick_script = lambda job: Failed(code="invalid_request", message="No.")
        refused = await gateway.http.post("/v1/embeddings", json=body, headers=headers)
        worker.quick_script = count_words
        answered = await gateway.http.post("/v1/embeddings", json=body, headers=headers)

    assert (refused.status_code, answered.status_code) == (400, 200)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, chat_body(max_tokens=50), "max_tokens"),
        (CHAT, chat_body(max_completion_tokens=50), "max_completion_tokens"),
        (
            "/v1/responses",
            {"model": MODEL, "input": "a", "max_output_tokens": 50},
            "max_output_tokens",
        ),
        ("/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 50}, "max_tokens"),
    ],
)
async def test_a_refusal_names_the_parameter_that_was_sent(
    bus: MemoryBus,
    worker: ScriptedWorker,
    file: KeyFile,
    path: str,
    body: dict[str, Any],
    param: str,
) -> None:
    headers = headers_of(file, max_tokens=10)
    async with live_gateway(bus, keys_file=file.path) as gateway:
        answer = await gateway.http.post(path, json=body, headers=headers)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert answer.json()["error"]["message"].startswith(f"{param} is too large: 50.")


@pytest.mark.parametrize("max_bytes_in_flight", [100_000, 10_000_000])
async def test_the_logprobs_of_a_whole_answer_take_room(
    bus: MemoryBus, worker: ScriptedWorker, max_bytes_in_flight: int
) -> None:
    logprobs = (TokenLogprobs(Logprob(7, -1.0, b"a")),) * 5000

    async def score(job: ScriptedJob) -> None:
        await job.start()
        scores = PromptScores(
            prompt=0, attempt=1, start=0, token_ids=(7,) * len(logprobs), logprobs=logprobs
        )
        await job.publish(scores)
        await job.finish("a")

    worker.script = score
    async with live_gateway(bus, max_bytes_in_flight=max_bytes_in_flight) as gateway:
        answer = await gateway.http.post(
            "/v1/completions", json={"model": MODEL, "prompt": "a", "prompt_logprobs": 0}
        )

    assert answer.status_code == (429 if max_bytes_in_flight < 400 * len(logprobs) else 200)
    if answer.status_code == 200:
        assert len(answer.json()["choices"][0]["prompt_logprobs"]) == len(logprobs)


@pytest.fixture
def held(worker: ScriptedWorker) -> asyncio.Event:
    """The worker's jobs say a word and go on until this is set."""
    return wait_before_the_end(worker, "word ")


async def leave_after_the_first_event(gateway: LiveGateway, headers: dict[str, str]) -> int:
    """Read a stream up to its first event, or a refusal; returns the status."""
    body = chat_body(stream=True)
    async with gateway.http.stream("POST", CHAT, json=body, headers=headers) as answer:
        async for _ in answer.aiter_raw():
            break
        return answer.status_code


async def test_clients_that_leave_after_the_first_event_run_no_second_job_beside_the_first(
    broker: MemoryBroker, worker: ScriptedWorker, file: KeyFile, held: asyncio.Event
) -> None:
    headers = headers_of(file, max_concurrent=1)
    async with two_gateways(broker, keys_file=file.path) as (first, second):
        statuses = [await leave_after_the_first_event(one, headers) for one in (first, second) * 4]
        assert statuses == [200, *[429] * 7]
        assert worker.most_running == 1

        held.set()

        async def is_free() -> bool:
            return await leave_after_the_first_event(second, headers) == 200

        await eventually(is_free)
    assert worker.most_running == 1


async def test_a_client_that_does_not_return_frees_its_place_when_its_job_is_cancelled(
    bus: MemoryBus, worker: ScriptedWorker, file: KeyFile, held: asyncio.Event
) -> None:
    headers = headers_of(file, max_concurrent=1)
    async with live_gateway(bus, keys_file=file.path, disconnect_grace_s=0.2) as gateway:
        assert await leave_after_the_first_event(gateway, headers) == 200

        async def is_free() -> bool:
            return await leave_after_the_first_event(gateway, headers) == 200

        await eventually(is_free)
    assert worker.most_running == 1


async def test_the_worker_counts_the_tokens_of_a_client_that_has_left(
    bus: MemoryBus, worker: ScriptedWorker, file: KeyFile, held: asyncio.Event
) -> None:
    headers = headers_of(file, tokens_per_minute=10_000)
    async with live_gateway(bus, keys_file=file.path, disconnect_grace_s=20) as gateway:
        await leave_after_the_first_event(gateway, headers)
        left = await gateway.http.get("/v1/models", headers=headers)
        held.set()

        async def is_settled() -> bool:
            listed = await gateway.http.get("/v1/models", headers=headers)
            return listed.headers["x-ratelimit-remaining-tokens"] == str(10_000 - num_used)

        num_used = len(words(worker.jobs[0].job.prompts[0])) + 2
        assert int(left.headers["x-ratelimit-remaining-tokens"]) < 9_000
        await eventually(is_settled)


async def test_prompts_in_tools_count_before_they_run(
    bus: MemoryBus, worker: ScriptedWorker, file: KeyFile, held: asyncio.Event
) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "word " * 1400}}
    headers = headers_of(file, tokens_per_minute=2000)
    body = chat_body(tools=[tool], max_tokens=1)
    worker.announcement = structs.replace(worker.announcement, tool_parser="hermes")
    async with live_gateway(bus, keys_file=file.path) as gateway:
        await hears_a_worker(gateway, headers)
        asking = [
            asyncio.create_task(gateway.http.post(CHAT, json=body, headers=headers))
            for _ in range(8)
        ]

        async def are_all_decided() -> bool:
            return sum(one.done() for one in asking) == 7 and bool(worker.jobs)

        await eventually(are_all_decided)
        held.set()
        answers = [await one for one in asking]

    assert sorted(answer.status_code for answer in answers) == [200, *[429] * 7]
    assert len(worker.jobs) == 1
    (job,) = worker.jobs
    assert (job.job.max_total_tokens, job.job.is_counted) == (2000, True)


async def test_a_client_that_returns_with_its_idempotency_key_is_admitted_beside_its_job(
    broker: MemoryBroker, worker: ScriptedWorker, file: KeyFile, held: asyncio.Event
) -> None:
    headers = {**headers_of(file, max_concurrent=1), "Idempotency-Key": "one"}
    async with two_gateways(broker, keys_file=file.path) as (first, second):
        assert await leave_after_the_first_event(first, headers) == 200
        held.set()

        answer = await second.http.post(CHAT, json=chat_body(stream=True), headers=headers)

    assert answer.status_code == 200
    assert "done" in answer.text
    assert len(worker.jobs) == 1


async def test_texts_of_a_client_that_has_left_count_until_they_are_embedded(
    bus: MemoryBus, worker: ScriptedWorker, file: KeyFile
) -> None:
    asked: list[QuickJob] = []

    def hold(job: QuickJob) -> None:
        asked.append(job)

    worker.quick_script = hold
    headers = headers_of(file, max_concurrent=1)
    body = {"model": MODEL, "input": "a"}
    async with live_gateway(bus, keys_file=file.path) as gateway:

        async def is_asked() -> bool:
            return bool(asked)

        async def embed() -> httpx.Response:
            return await gateway.http.post("/v1/embeddings", json=body, headers=headers)

        leaving = asyncio.create_task(embed())
        await eventually(is_asked)
        leaving.cancel()
        await asyncio.wait([leaving])
        refused = await embed()
        answer = Failed(code="invalid_request", message="No.")
        reply_to = topology.reply_binding(worker.quick_messages[0].reply_to)
        await bus.publish(reply_to, Message(encode(answer), correlation_id=asked[0].request_id))
        worker.quick_script = count_words

        async def is_free() -> bool:
            return (await embed()).status_code == 200

        await eventually(is_free)

    assert refused.status_code == 429


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, b"{"),
        (CHAT, b'{"model": "scripted", "messages": [], "max_tokens": 1}'),
        (CHAT, b'{"model": "unknown", "messages": [{"role": "user", "content": "a"}]}'),
        ("/v1/embeddings", b'{"model": "scripted"}'),
    ],
    ids=["syntax", "field", "model", "quick"],
)
async def test_refused_requests_count_and_the_next_one_is_a_limited_request(
    bus: MemoryBus, worker: ScriptedWorker, file: KeyFile, path: str, body: bytes
) -> None:
    headers = {**headers_of(file, requests_per_minute=2), "content-type": "application/json"}
    async with live_gateway(bus, keys_file=file.path) as gateway:
        answers = [await gateway.http.post(path, content=body, headers=headers) for _ in range(3)]

    statuses = [answer.status_code for answer in answers]
    assert statuses[0] == statuses[1] in (400, 404)
    assert statuses[2] == 429
    remaining = [answer.headers["x-ratelimit-remaining-requests"] for answer in answers]
    assert remaining == ["1", "0", "0"]


async def test_requests_that_read_or_store_have_a_limit_of_their_own(
    bus: MemoryBus, worker: ScriptedWorker, file: KeyFile, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    headers = headers_of(file, requests_per_minute=1)
    async with live_gateway(bus, keys_file=file.path) as gateway:
        answers = [await gateway.http.get("/v1/models", headers=headers) for _ in range(60)]
        refused = await gateway.http.post("/v1/conversations", json={}, headers=headers)
        metrics = (await gateway.http.get("/metrics")).text

    assert {answer.status_code for answer in answers} == {200}
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "requests")
    assert (
        "requests of any kind per minute of this API key: Limit 60, Used 60"
        in refused.json()["error"]["message"]
    )
    assert 0 < int(refused.headers["retry-after"]) <= 61
    assert 'refused_total{reason="requests_per_minute"} 1.0' in metrics
    assert "requests_per_minute" in [vars(one).get("limit") for one in caplog.records]
