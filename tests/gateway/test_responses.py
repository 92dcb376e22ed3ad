"""The Responses API, through the official client. Section 7 of OPENAI.md."""

import asyncio
import json
from typing import Any

import msgspec
import openai
import pytest

from gateway.requests.schemas import parse_body
from gateway.responses.items import messages_of
from gateway.responses.schemas import ResponsesRequest, renamed
from shared.errors import InvalidRequest
from shared.messages import ChatPrompt
from tests.support.http import LiveGateway, eventually
from tests.support.scripted_worker import MODEL, ScriptedJob, ScriptedWorker
from tests.support.wording import Log, context_of

CALL = 'Sure. <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}


def response_log(**fields: Any) -> Log:
    return Log(context_of(endpoint="responses", request_id="resp-1", **fields))


async def test_a_response_comes_whole(gateway: LiveGateway) -> None:
    response = await gateway.openai.responses.create(model=MODEL, input="one two")

    assert response.output_text == "one two"
    assert response.status == "completed"
    assert response.id.startswith("resp-")
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (2, 2)


async def test_a_response_is_streamed(gateway: LiveGateway) -> None:
    async with gateway.openai.responses.stream(model=MODEL, input="one two") as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()

    assert final.output_text == "one two"
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(10))


async def test_parameters_reach_the_worker(gateway: LiveGateway, worker: ScriptedWorker) -> None:
    response = await gateway.openai.responses.create(
        model=MODEL,
        instructions="Be brief.",
        input=[{"role": "user", "content": [{"type": "input_text", "text": "one"}]}],
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.9,
        text={"format": {"type": "json_object"}},
        metadata={"a": "b"},
        extra_body={"seed": 3, "top_k": 5},
    )

    sampling, prompt = worker.jobs[0].job.sampling, worker.jobs[0].job.prompts[0]
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (7, 0.5, 0.9)
    assert (sampling.seed, sampling.top_k) == (3, 5)
    assert sampling.constraint is not None
    assert isinstance(prompt, ChatPrompt)
    assert [message.content for message in prompt.messages] == ["Be brief.", "one"]
    assert (response.instructions, response.metadata) == ("Be brief.", {"a": "b"})


async def test_a_background_response_goes_on_alone(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    """Section 7: queued, in progress, completed; read as often as one likes."""
    may_end = asyncio.Event()

    async def wait_in_the_middle(job: ScriptedJob) -> None:
        await job.start()
        await job.say("one ")
        await may_end.wait()
        await job.finish("two")

    worker.script = wait_in_the_middle
    queued = await gateway.openai.responses.create(model=MODEL, input="x", background=True)
    assert queued.status == "queued"

    async def has_begun() -> bool:
        return (await gateway.openai.responses.retrieve(queued.id)).output_text == "one "

    await eventually(has_begun)
    assert (await gateway.openai.responses.retrieve(queued.id)).status == "in_progress"
    may_end.set()

    async def is_completed() -> bool:
        return (await gateway.openai.responses.retrieve(queued.id)).status == "completed"

    await eventually(is_completed)
    response = await gateway.openai.responses.retrieve(queued.id)
    assert response.output_text == "one two"
    assert response.model == MODEL


@pytest.mark.parametrize("kept", [{"background": True}, {"store": True}])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_response_that_failed_is_there_as_long_as_one_that_did_not(
    gateway: LiveGateway, worker: ScriptedWorker, kept: dict[str, bool], stream: bool
) -> None:
    async def fail(job: ScriptedJob) -> None:
        await job.start()
        await job.say("one ")
        await job.fail("worker_lost", "gone")

    worker.script = fail
    body = {"model": MODEL, "input": "x", "stream": stream, **kept}
    response_id = (await gateway.post("/v1/responses", **body)).headers["x-request-id"]
    await worker.wait_until(lambda: bool(worker.jobs) and not worker.num_running)

    for _ in range(2):
        again = await gateway.openai.responses.retrieve(response_id)
        assert again.status == "failed"
        assert again.error is not None
        assert (again.error.code, again.output_text) == ("worker_lost", "one ")
        events = [
            e async for e in await gateway.openai.responses.retrieve(response_id, stream=True)
        ]
        assert events[-1].type == "response.failed"


async def test_a_stored_stream_is_read_again_behind_what_was_seen(gateway: LiveGateway) -> None:
    """Section 7: ``starting_after``."""
    stream = await gateway.openai.responses.create(
        model=MODEL, input="one two three", store=True, stream=True
    )
    events = [event async for event in stream]
    first: Any = events[0]

    again = await gateway.openai.responses.retrieve(
        first.response.id, stream=True, starting_after=4
    )

    assert [event async for event in again] == events[5:]


async def test_a_background_response_is_cancelled(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    async def say_one_word(job: ScriptedJob) -> None:
        await job.start()
        await job.say("one ")
        await worker.wait_cancelled(job.job.request_id)

    worker.script = say_one_word
    queued = await gateway.openai.responses.create(model=MODEL, input="x", background=True)
    await worker.wait_until(lambda: bool(worker.jobs))

    cancelled = await gateway.openai.responses.cancel(queued.id)

    assert cancelled.status == "cancelled"
    await worker.wait_until(lambda: worker.num_running == 0)


async def test_what_is_no_response_is_not_found(gateway: LiveGateway) -> None:
    for response_id in ("resp-" + "0" * 32, "nonsense"):
        with pytest.raises(openai.APIStatusError) as caught:
            await gateway.openai.responses.retrieve(response_id)
        assert caught.value.status_code in (404, 410)


def test_a_call_is_an_item_of_its_own() -> None:
    log = response_log(tool_parser="hermes").say(*CALL).finish()

    message, call = log.whole()["output"]

    assert message["content"][0]["text"] == "Sure."
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "f", '{"a": 1}')
    assert call["call_id"].startswith("call_")
    deltas = [event for event in log.chunks() if event["type"].endswith("arguments.delta")]
    assert "".join(delta["delta"] for delta in deltas) == call["arguments"]


@pytest.mark.parametrize(
    "log",
    [
        response_log().say("a").finish("b"),
        response_log().say("a").finish("", "length"),
        response_log().finish(),
        response_log(logprobs=1).say("a").finish("b"),
        response_log(tool_parser="hermes", reasoning_parser="qwen3", logprobs=0)
        .say("<think>", "hm", "</think>", *CALL)
        .finish(),
    ],
)
def test_a_stream_ends_with_the_whole_response(log: Log) -> None:
    events = log.chunks()

    assert events[-1]["response"] == log.whole()
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [kind for kind, _ in log.payloads()] == [event["type"] for event in events]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == log.whole()["output"]


def test_an_answer_that_was_cut_off_is_incomplete() -> None:
    response = response_log().finish("a", "length").whole()

    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}


def test_a_failure_is_an_event() -> None:
    *_, last = response_log().say("a").fail("worker_lost").chunks()

    assert last["type"] == "response.failed"
    assert last["response"]["error"]["code"] == "worker_lost"


def test_items_become_messages() -> None:
    items = [
        {"role": "user", "content": "What is the weather?"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "?"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "rain"},
    ]

    system, user, assistant, tool = messages_of("Be brief.", items)

    assert (system["role"], user["role"]) == ("system", "user")
    assert (assistant["content"], assistant["reasoning_content"]) == ("?", "hm")
    assert [call["id"] for call in assistant["tool_calls"]] == ["1", "2"]
    assert tool == {"role": "tool", "tool_call_id": "1", "content": "rain"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"n": 2}, "n"),
        ({"background": True, "store": False}, "store"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": 3}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"temperature": "hot"}, "temperature"),
        ({"prediction": {"a": 1}}, "prediction"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    raw = msgspec.json.encode({"model": "m", "input": "x", **body})

    with pytest.raises(InvalidRequest) as caught:
        parse_body(ResponsesRequest, raw).chat()

    assert caught.value.param == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"input": [{"role": "alien", "content": "x"}]}, "input[0].role"),
    ],
)
async def test_a_bad_value_bears_the_name_that_its_client_knows(
    gateway: LiveGateway, body: dict[str, Any], param: str
) -> None:
    response = await gateway.post("/v1/responses", **{"model": MODEL, "input": "x", **body})

    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert error["message"].startswith(param)


def test_other_errors_keep_their_names() -> None:
    assert renamed(InvalidRequest("x", param="temperature")).param == "temperature"


def test_a_response_repeats_its_request() -> None:
    body = msgspec.json.encode({"model": "m", "input": "x", "tools": [TOOL], "top_p": 0.5})
    request = parse_body(ResponsesRequest, body)

    echoed = json.loads(request.echoed())

    assert (echoed["tools"], echoed["top_p"], echoed["instructions"]) == ([TOOL], 0.5, None)
