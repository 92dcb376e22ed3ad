"""What a response's body may not say, and the name that an error gives it."""

from typing import Any, Literal

import msgspec
import pytest

from gateway.api.bodies.input_items import stored_items
from gateway.api.bodies.messages import MessagesRequest
from gateway.api.bodies.parsing import parse, read
from gateway.api.bodies.responses import ResponsesRequest, with_response_errors
from gateway.api.bodies.schemas import ChatRequest
from gateway.api.bodies.submission import submission
from gateway.batches.lines import ENDPOINTS
from shared.errors import InvalidRequest
from shared.messages import MAX_CONTEXT_BYTES, Failed, GenerationJob, SamplingParams
from tests.support.gateway.http import LiveGateway, hears_a_worker
from tests.support.workers.scripted_worker import MODEL, ScriptedJob, ScriptedWorker

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
USER = {"role": "user", "content": "x"}
ALIEN = {"role": "alien", "content": "x"}
LONG = "x" * ((1 << 20) + 1)
LARGE = "x" * 600_000
QUOTES = '"' * 600_000
"""Twice as long as JSON."""
LARK = {"type": "grammar", "syntax": "lark", "definition": LARGE}
THOUGHT = {"type": "thinking", "thinking": LARGE}
FUNCTION_CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "1", "output": "x"}
NAMELESS = {"type": "function_call", "call_id": "1", "arguments": "{}"}


def job_of(**body: Any) -> GenerationJob:
    raw = msgspec.json.encode({"model": "m", "input": "x", **body})
    return submission(parse(ResponsesRequest, raw), request_id="r", created_at=1.0).job


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"previous_response_id": "r", "conversation": "c"}, "previous_response_id"),
        ({"conversation": "c", "store": False}, "store"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "last_messages"}, "truncation"),
        ({"n": 2}, "n"),
        ({"max_tool_calls": "x"}, "max_tool_calls"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"background": True, "store": False}, "store"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tools[0].type"),
        ({"input": 3}, "input"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"temperature": "hot"}, "temperature"),
        ({"prediction": {"a": 1}}, "prediction"),
        ({"text": {"verbosity": 3}}, "text.verbosity"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "none", "tools": []}}, "tool_choice"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(body: dict[str, Any], param: str) -> None:

    with pytest.raises(InvalidRequest) as caught:
        job_of(**body)

    assert caught.value.param == param


@pytest.mark.parametrize(
    ("name", "value", "ours"),
    [
        ("response_format", {"type": "json_object"}, "text.format"),
        ("max_completion_tokens", 3, "max_output_tokens"),
        ("detach", True, "background"),
        ("logprobs", True, "include"),
        ("messages", [{"role": "user", "content": "x"}], "input"),
        ("reasoning_effort", "low", "reasoning.effort"),
        ("verbosity", "low", "text.verbosity"),
    ],
)
def test_what_chat_calls_otherwise_is_refused_with_its_name_here(
    name: str, value: object, ours: str
) -> None:

    with pytest.raises(InvalidRequest, match=f"is called {ours} here") as caught:
        job_of(**{name: value})

    assert caught.value.param == name


def test_what_asks_for_nothing_is_tolerated() -> None:
    job = job_of(logprobs=False, max_tool_calls=3)

    assert job.sampling == SamplingParams()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": 3}}},
            "text.format.schema",
        ),
        ({"tools": [TOOL, {**TOOL, "name": "a b"}]}, "tools[1].name"),
        ({"input": LONG}, "input"),
        ({"input": [ALIEN]}, "input[0].role"),
        ({"input": [ALIEN], "instructions": "Be brief."}, "input[0].role"),
        ({"input": [USER, FUNCTION_CALL, FUNCTION_CALL, ALIEN]}, "input[3].role"),
        ({"input": [NAMELESS]}, "input[0].name"),
        ({"input": [USER, FUNCTION_CALL, NAMELESS]}, "input[2].name"),
        ({"input": [USER, FUNCTION_CALL, {**FUNCTION_CALL, "call_id": 3}]}, "input[2].call_id"),
        ({"input": [USER, {**OUTPUT, "call_id": 3}]}, "input[1].call_id"),
        ({"input": [USER, FUNCTION_CALL, {**OUTPUT, "output": LONG}]}, "input[2].output"),
        (
            {
                "input": [
                    {"type": "reasoning", "content": [{"type": "text", "text": LONG}]},
                    {"role": "assistant", "content": "x"},
                ]
            },
            "input[0].content",
        ),
        ({"instructions": "x" * MAX_CONTEXT_BYTES}, "instructions"),
        ({"tools": [{**TOOL, "description": "x" * MAX_CONTEXT_BYTES}]}, "tools"),
    ],
)
async def test_an_error_names_the_parameter_as_its_client_sent_it(
    gateway: LiveGateway, body: dict[str, Any], param: str
) -> None:
    await hears_a_worker(gateway)

    response = await gateway.post("/v1/responses", **{"model": MODEL, "input": "x", **body})

    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert error["message"].startswith(param)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_error_of_the_worker_names_the_parameter_as_its_client_sent_it(
    gateway: LiveGateway, worker: ScriptedWorker, stream: bool
) -> None:
    async def refuse(job: ScriptedJob) -> None:
        code = "context_length_exceeded"
        await job.publish(Failed(code=code, message="Too long.", param="messages"))

    worker.script = refuse

    response = await gateway.post("/v1/responses", model=MODEL, input="x", stream=stream)

    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "input")
    assert (error["code"], error["message"]) == ("context_length_exceeded", "Too long.")


def called(**call: Any) -> dict[str, Any]:
    """The body of a chat whose assistant has made a call."""
    return {"messages": [USER, {"role": "assistant", **call}]}


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def turns(*contents: Any) -> dict[str, Any]:
    """The body of a message whose assistant has said this."""
    said = [{"role": "assistant", "content": content} for content in contents]
    return {"max_tokens": 1, "messages": [USER, *said]}


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (MessagesRequest, turns([THOUGHT, THOUGHT]), "messages[1].content"),
        (MessagesRequest, turns([THOUGHT], [THOUGHT]), "messages[2].content"),
        (
            MessagesRequest,
            turns([{"type": "tool_use", "id": "1", "name": "f", "input": {"a": QUOTES}}]),
            "messages[1].content[0].input",
        ),
        (
            ChatRequest,
            called(tool_calls=[{"function": {"name": "f", "arguments": {"a": QUOTES}}}]),
            "messages[1].tool_calls[0].function.arguments",
        ),
        (
            ChatRequest,
            called(tool_calls=[{"type": "custom", "custom": {"name": "f", "input": QUOTES}}]),
            "messages[1].tool_calls[0].custom.input",
        ),
        (
            ChatRequest,
            called(function_call={"name": "f", "arguments": {"a": QUOTES}}),
            "messages[1].function_call.arguments",
        ),
        (
            ResponsesRequest,
            {"input": [{**FUNCTION_CALL, "arguments": {"a": QUOTES}}]},
            "input[0].arguments",
        ),
        (
            ResponsesRequest,
            {"input": [{"type": "custom_tool_call", "name": "f", "input": QUOTES}]},
            "input[0].input",
        ),
        (
            ResponsesRequest,
            {
                "input": "x",
                "tools": [{"type": "custom", "name": "f", "description": LARGE, "format": LARK}],
            },
            "tools[0].format",
        ),
    ],
)
def test_a_text_that_becomes_too_long_for_a_job_is_refused(
    kind: type[ChatRequest | MessagesRequest | ResponsesRequest], body: dict[str, Any], param: str
) -> None:
    request = parse(kind, msgspec.json.encode({"model": "m", **body}))

    with pytest.raises(InvalidRequest, match="longer than 1048576 characters") as caught:
        submission(request, request_id="r", created_at=1.0)

    assert caught.value.param == param


@pytest.mark.parametrize("value", [pytest.param(nested(800), id="nested"), 2**64])
async def test_arguments_that_cannot_be_written_are_refused(
    gateway: LiveGateway, value: object
) -> None:
    await hears_a_worker(gateway)
    function = {"name": "f", "arguments": {"a": value}}
    answers = [
        await gateway.post("/v1/chat/completions", model=MODEL, **called(**call))
        for call in ({"tool_calls": [{"function": function}]}, {"function_call": function})
    ]
    item = {**FUNCTION_CALL, "arguments": {"a": value}}
    answers += [
        await gateway.post("/v1/responses", model=MODEL, input=[item], store=store)
        for store in (True, False)
    ]
    answers.append(await gateway.post("/v1/conversations", items=[item]))

    assert [(answer.status_code, answer.json()["error"]["param"]) for answer in answers] == [
        (400, "messages[1].tool_calls[0].function.arguments"),
        (400, "messages[1].function_call.arguments"),
        (400, "input[0].arguments"),
        (400, "input[0].arguments"),
        (400, "items[0].arguments"),
    ]


@pytest.mark.parametrize(
    "item",
    [
        {**FUNCTION_CALL, "arguments": {"a": QUOTES}},
        {"type": "custom_tool_call", "name": "f", "input": QUOTES},
    ],
)
def test_a_call_that_no_response_could_continue_is_not_stored(item: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="longer than 1048576 characters"):
        stored_items([item])


def test_other_errors_keep_their_names() -> None:
    with pytest.raises(InvalidRequest) as caught, with_response_errors():
        raise InvalidRequest("x", param="messages_of_old")

    assert caught.value.param == "messages_of_old"


@pytest.mark.parametrize("name", ["previous_response_id", "conversation"])
def test_nothing_is_continued_in_a_batch(name: str) -> None:
    body = msgspec.json.encode({"model": "m", "input": "x", name: "id"})

    with pytest.raises(InvalidRequest) as caught:
        ENDPOINTS["/v1/responses"].read(body)

    assert caught.value.param == name


def test_nothing_is_truncated_in_a_batch() -> None:
    body = msgspec.json.encode({"model": "m", "input": "x", "truncation": "auto"})

    with pytest.raises(InvalidRequest, match="not supported in a batch") as caught:
        ENDPOINTS["/v1/responses"].read(body)

    assert caught.value.param == "truncation"


class _Leaf(msgspec.Struct):
    kind: Literal["a", "b"] | None = None


class _Tree(msgspec.Struct):
    leaves: list[_Leaf] | str = ""


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        (_Leaf, {"kind": "c"}, "kind: invalid enum value 'c'; expected a or b"),
        (_Tree, {"leaves": [{}, {"kind": "c"}]}, "leaves: invalid enum value 'c'; expected a or b"),
        (_Tree, {"leaves": [{"kind": 1}]}, "leaves: expected `str | null`, got `int`"),
    ],
)
def test_the_words_that_a_parameter_may_have_are_named(kind: type, value: Any, said: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        read(value, kind)

    assert refusal.value.message == said
