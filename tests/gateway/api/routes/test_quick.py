"""POST /tokenize, /detokenize and /v1/embeddings."""

import base64
import struct
from typing import Any

import openai
import pytest

from shared.bus.memory import MemoryBus
from shared.messages import (
    MAX_EMBEDDING_INPUTS,
    ChatPrompt,
    Failed,
    QuickAnswer,
    QuickJob,
    TokenizeJob,
)
from tests.support.gateway.http import LiveGateway, hears_a_worker, live_gateway
from tests.support.workers.scripted_worker import MODEL, ScriptedWorker, count_words


async def test_a_prompt_is_tokenized(gateway: LiveGateway) -> None:
    body = {"model": MODEL, "prompt": "one three", "return_token_strs": True}

    answer = (await gateway.post("/tokenize", **body)).json()

    assert answer == {
        "count": 2,
        "max_model_len": 2048,
        "tokens": [3, 5],
        "token_strs": ["one", "three"],
    }


async def test_a_conversation_is_tokenized(gateway: LiveGateway) -> None:
    messages = [{"role": "user", "content": "one two"}]

    answer = (await gateway.post("/tokenize", model=MODEL, messages=messages)).json()

    assert (answer["tokens"], answer["token_strs"]) == ([3, 3], None)


async def test_the_tokens_of_a_response_are_counted(gateway: LiveGateway) -> None:
    counted = await gateway.openai.responses.input_tokens.count(model=MODEL, input="one two")

    assert (counted.object, counted.input_tokens) == ("response.input_tokens", 2)


_CHAT_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_CALL_BODIES: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/responses/input_tokens",
        {
            "input": [
                {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "x"},
            ]
        },
    ),
    (
        "/v1/messages/count_tokens",
        {
            "messages": [
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {}}],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "x"}],
                },
            ]
        },
    ),
    (
        "/tokenize",
        {
            "messages": [
                {"role": "assistant", "tool_calls": [_CHAT_CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": "x"},
            ]
        },
    ),
]


@pytest.mark.parametrize(("path", "body"), _CALL_BODIES)
@pytest.mark.parametrize(
    ("parsers", "call_id"),
    [({"tool_parser": "hermes"}, "c1"), ({"tool_parser": "kimi_k2"}, "functions.f:0")],
)
async def test_earlier_calls_are_counted_as_the_model_sees_them(
    gateway: LiveGateway,
    worker: ScriptedWorker,
    path: str,
    body: dict[str, Any],
    call_id: str,
) -> None:
    asked = []

    def count(job: QuickJob) -> QuickAnswer | Failed:
        asked.append(job)
        return count_words(job)

    worker.quick_script = count

    response = await gateway.post(path, model=MODEL, **body)

    assert response.status_code == 200
    (job,) = asked
    assert isinstance(job, TokenizeJob)
    assert isinstance(job.prompt, ChatPrompt)
    made, result = job.prompt.messages
    assert ([call.id for call in made.tool_calls], result.tool_call_id) == ([call_id], call_id)


async def test_token_ids_become_text(gateway: LiveGateway) -> None:
    answer = (await gateway.post("/detokenize", model=MODEL, tokens=[1, 2])).json()

    assert answer == {"prompt": "x xx"}


async def test_nothing_becomes_nothing(gateway: LiveGateway) -> None:
    tokens = (await gateway.post("/tokenize", model=MODEL, prompt="")).json()
    text = (await gateway.post("/detokenize", model=MODEL, tokens=[])).json()

    assert (tokens["count"], tokens["tokens"], text) == (0, [], {"prompt": ""})


@pytest.mark.parametrize("encoding", ["float", "base64"])
async def test_texts_are_embedded(gateway: LiveGateway, encoding: str) -> None:
    body = {"model": MODEL, "input": ["one two", "three"], "encoding_format": encoding}

    answer = (await gateway.post("/v1/embeddings", **body, dimensions=3)).json()

    vectors = [item["embedding"] for item in answer["data"]]
    if encoding == "base64":
        vectors = [list(struct.unpack("<3f", base64.b64decode(vector))) for vector in vectors]
    assert vectors == [[1.0, 0.0, 0.0]] * 2
    assert [item["index"] for item in answer["data"]] == [0, 1]
    assert answer["usage"] == {"prompt_tokens": 3, "total_tokens": 3}


async def test_as_many_texts_are_embedded_as_openai_takes(gateway: LiveGateway) -> None:
    texts = ["one"] * MAX_EMBEDDING_INPUTS

    answer = (await gateway.post("/v1/embeddings", model=MODEL, input=texts)).json()

    assert len(answer["data"]) == len(texts)


async def test_the_official_client_reads_embeddings(gateway: LiveGateway) -> None:
    answer = await gateway.openai.embeddings.create(model=MODEL, input="one")

    assert list(answer.data[0].embedding) == [1.0, 0.0, 0.0, 0.0]


async def test_a_model_without_embeddings_says_so(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    def refuse(job: QuickJob) -> QuickAnswer | Failed:
        return Failed(code="invalid_request", message="This model has none.", param="model")

    worker.quick_script = refuse

    with pytest.raises(openai.BadRequestError, match="has none"):
        await gateway.openai.embeddings.create(model=MODEL, input="one")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"messages": [{"role": "alien", "content": "b"}]}, "messages[0].role"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [100]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"token_ids": [1]}, "tokens"),
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "dimensions": 5}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "dimensions": 1 << 40}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "dimensions": 1 << 64}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ("/v1/embeddings", {"input": ["a"] * (MAX_EMBEDDING_INPUTS + 1)}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": {"a": 1}}, "input"),
    ],
)
async def test_a_bad_value_is_named(
    gateway: LiveGateway, path: str, body: dict[str, Any], param: str
) -> None:
    await hears_a_worker(gateway)

    response = await gateway.post(path, **{"model": MODEL, **body})

    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("model", ["gpt-5", "../etc", "a b", ""])
async def test_an_unknown_model_is_not_found(gateway: LiveGateway, model: str) -> None:
    response = await gateway.post("/tokenize", model=model, prompt="a")

    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


async def test_an_answer_that_never_comes_ends_with_the_deadline(
    bus: MemoryBus, worker: ScriptedWorker
) -> None:
    worker.quick_script = lambda _: None

    async with live_gateway(bus, request_timeout_s=0.2) as gateway:
        response = await gateway.post("/tokenize", model=MODEL, prompt="a")

    assert response.status_code == 504


async def test_what_was_asked_before_the_connection_was_lost_is_answered_after(
    gateway: LiveGateway, bus: MemoryBus, worker: ScriptedWorker
) -> None:
    num_asked = 0

    def cut_off_once(job: QuickJob) -> QuickAnswer | Failed | None:
        nonlocal num_asked
        num_asked += 1
        if num_asked > 1:
            return count_words(job)
        bus.sever()
        return None

    worker.quick_script = cut_off_once

    answer = await gateway.post("/tokenize", model=MODEL, prompt="one")

    assert answer.json()["tokens"] == [3]
