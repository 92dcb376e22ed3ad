"""Tools over HTTP, through the official client."""

from typing import Any

import pytest
from openai.types.chat import (
    ChatCompletionMessageCustomToolCall,
    ChatCompletionMessageParam,
    ChatCompletionToolParam,
)
from openai.types.responses import (
    CustomToolParam,
    ResponseCustomToolCall,
    ResponseCustomToolCallInputDeltaEvent,
    ResponseCustomToolCallInputDoneEvent,
)

from shared.messages import ChatPrompt, ToolCall
from tests.support.gateway.http import LiveGateway
from tests.support.models.grammars import matches
from tests.support.workers.scripted_worker import MODEL, Script, ScriptedJob, ScriptedWorker

USER: list[ChatCompletionMessageParam] = [{"role": "user", "content": "one"}]
TOOL: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
CITY = {
    "type": "json_schema",
    "json_schema": {"name": "city", "schema": TOOL["function"].get("parameters")},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


async def call_twice(job: ScriptedJob) -> None:
    await job.start()
    for char in f"Let me see.\n{CALL}\n{CALL}":
        await job.say(char)
    await job.finish()


@pytest.fixture
def worker_script() -> Script:
    return call_twice


@pytest.fixture
def parsers() -> dict[str, str]:
    return {"tool_parser": "hermes"}


async def test_calls_are_the_same_streamed_and_whole(gateway: LiveGateway) -> None:
    async with gateway.openai.chat.completions.stream(
        model=MODEL, messages=USER, tools=[TOOL]
    ) as stream:
        streamed = (await stream.get_final_completion()).choices[0]
    whole = (
        await gateway.openai.chat.completions.create(model=MODEL, messages=USER, tools=[TOOL])
    ).choices[0]

    for choice in (streamed, whole):
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see."
        assert choice.message.tool_calls is not None
        calls: list[Any] = list(choice.message.tool_calls)
        assert [call.function.arguments for call in calls] == ['{"city": "Rome"}'] * 2
        assert len({call.id for call in calls}) == 2


async def test_tools_and_what_they_said_reach_the_template(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    messages = [
        *USER,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": "{}"},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]

    await gateway.post("/v1/chat/completions", model=MODEL, messages=messages, tools=[TOOL])

    prompt = worker.jobs[0].job.prompts[0]
    assert isinstance(prompt, ChatPrompt)
    assert [tool.name for tool in prompt.tools] == ["get_weather"]
    assert prompt.messages[1].tool_calls == (
        ToolCall(id="call_1", name="get_weather", arguments="{}"),
    )
    assert (prompt.messages[2].role, prompt.messages[2].tool_call_id) == ("tool", "call_1")


async def test_a_call_that_is_required_is_a_constraint(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    response = await gateway.chat(tools=[TOOL], tool_choice="required", parallel_tool_calls=False)

    constraint = worker.jobs[0].job.sampling.constraint
    assert constraint is not None
    assert "get_weather" in constraint.source
    assert len(response.json()["choices"][0]["message"]["tool_calls"]) == 1


@pytest.mark.parametrize("name", ["auto", None])
async def test_an_answer_has_its_format_where_calls_are_allowed(
    gateway: LiveGateway, worker: ScriptedWorker, name: str | None
) -> None:
    response = await gateway.chat(tools=[TOOL], tool_choice=name, response_format=CITY)

    constraint = worker.jobs[0].job.sampling.constraint
    assert constraint is not None
    assert matches(constraint, '{"city": "Rome"}')
    assert matches(constraint, CALL)
    assert not matches(constraint, "It rains.")
    assert response.json()["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_a_call_that_is_required_has_no_format(
    gateway: LiveGateway, worker: ScriptedWorker, choice: Any
) -> None:
    response = await gateway.chat(tools=[TOOL], tool_choice=choice, response_format=CITY)

    constraint = worker.jobs[0].job.sampling.constraint
    assert response.status_code == 200
    assert constraint is not None
    assert matches(constraint, CALL)
    assert not matches(constraint, '{"city": "Rome"}')


async def test_a_call_that_is_allowed_is_bound_to_the_tools(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    await gateway.chat(tools=[TOOL])

    constraint = worker.jobs[0].job.sampling.constraint
    assert constraint is not None
    assert matches(constraint, f"It rains. {CALL}")
    assert not matches(constraint, CALL.replace("city", "town"))


@pytest.mark.parametrize("parameters", [{"properties": 3}, {"not": {"type": "string"}}])
async def test_a_call_that_is_allowed_is_free_only_if_its_own_schema_cannot_be_obeyed(
    gateway: LiveGateway, worker: ScriptedWorker, parameters: dict[str, Any]
) -> None:
    odd = {"type": "function", "function": {"name": "f", "parameters": parameters}}

    response = await gateway.chat(tools=[TOOL, odd])

    assert response.status_code == 200
    constraint = worker.jobs[0].job.sampling.constraint
    assert constraint is not None
    assert matches(constraint, '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>')
    assert matches(constraint, CALL)
    assert not matches(constraint, CALL.replace("city", "town"))


async def test_calls_are_free_if_many_schemas_cannot_be_obeyed(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    odd = [
        {"type": "function", "function": {"name": f"f{k}", "parameters": {"properties": k}}}
        for k in range(1, 9)
    ]

    response = await gateway.chat(tools=[TOOL, *odd])

    assert response.status_code == 200
    assert worker.jobs[0].job.sampling.constraint is None


CUSTOM: CustomToolParam = {
    "type": "custom",
    "name": "patch",
    "format": {"type": "grammar", "syntax": "regex", "definition": "[+-].*\\n"},
}
CUSTOM_CALL = '<tool_call>\n{"name": "patch", "arguments": {"input": "+é\\n"}}\n</tool_call>'


async def call_patch(job: ScriptedJob) -> None:
    await job.start()
    for char in CUSTOM_CALL:
        await job.say(char)
    await job.finish()


async def test_a_custom_tool_is_called_with_a_text_in_a_response(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    worker.script = call_patch
    client, choice = gateway.openai.responses, {"type": "custom", "name": "patch"}
    asked: Any = {"model": MODEL, "input": "one", "tools": [CUSTOM], "tool_choice": choice}

    whole = await client.create(**asked)
    events = [event async for event in await client.create(**asked, stream=True)]

    (call,) = whole.output
    assert isinstance(call, ResponseCustomToolCall)
    assert (call.name, call.input) == ("patch", "+é\n")
    said = [event for event in events if isinstance(event, ResponseCustomToolCallInputDeltaEvent)]
    assert "".join(event.delta for event in said) == "+é\n"
    (done,) = (event for event in events if isinstance(event, ResponseCustomToolCallInputDoneEvent))
    assert done.input == "+é\n"
    constraint = worker.jobs[0].job.sampling.constraint
    assert constraint is not None
    assert matches(constraint, CUSTOM_CALL)
    assert not matches(constraint, CUSTOM_CALL.replace("+", "*"))


async def test_a_custom_tool_is_called_with_a_text_in_a_chat(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    worker.script = call_patch
    tool: Any = {"type": "custom", "custom": {"name": "patch", "description": "Changes files."}}
    client = gateway.openai.chat.completions

    whole = await client.create(model=MODEL, messages=USER, tools=[tool], tool_choice="required")
    chunks = await client.create(model=MODEL, messages=USER, tools=[tool], stream=True)
    deltas = [call async for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]

    choice = whole.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    call = choice.message.tool_calls[0]
    assert isinstance(call, ChatCompletionMessageCustomToolCall)
    assert (call.type, call.custom.name, call.custom.input) == ("custom", "patch", "+é\n")
    streamed: list[Any] = [delta.to_dict() for delta in deltas]
    assert streamed[0]["custom"] == {"name": "patch", "input": ""}
    assert "".join(delta["custom"]["input"] for delta in streamed) == "+é\n"


async def test_earlier_calls_of_custom_tools_are_shown_to_the_model_as_calls_of_functions(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    custom = {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": "+a"}}
    messages: Any = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [custom]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]

    await gateway.openai.chat.completions.create(model=MODEL, messages=messages)

    (prompt,) = worker.jobs[0].job.prompts
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[1].tool_calls == (
        ToolCall(id="c1", name="patch", arguments='{"input":"+a"}'),
    )


async def test_an_earlier_call_is_one_of_a_function_or_of_a_custom_tool(
    gateway: LiveGateway,
) -> None:
    calls = [{"id": "c1", "type": "custom", "function": {"name": "f", "arguments": "{}"}}]

    response = await gateway.post(
        "/v1/chat/completions",
        model=MODEL,
        messages=[*USER, {"role": "assistant", "tool_calls": calls}],
    )

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[1].tool_calls[0].custom"


CODEX_TOOLS = [
    {"type": "function", "name": "shell", "parameters": {"type": "object", "properties": {}}},
    {
        "type": "custom",
        "name": "apply_patch",
        "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'},
    },
    {"type": "namespace", "name": "mcp", "tools": []},
    {"type": "web_search", "external_web_access": False},
]


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"background": True}])
async def test_tools_that_are_left_out_are_named_in_a_header(
    gateway: LiveGateway, worker: ScriptedWorker, more: dict[str, Any]
) -> None:
    response = await gateway.post(
        "/v1/responses", model=MODEL, input="one", tools=CODEX_TOOLS, tool_choice="auto", **more
    )

    assert response.status_code == 200
    assert response.headers["x-warren-ignored-tools"] == "namespace, web_search"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses/input_tokens", {"input": "one"}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "one"}]}),
    ],
)
async def test_tools_that_are_not_counted_are_named_in_a_header(
    gateway: LiveGateway, worker: ScriptedWorker, path: str, body: dict[str, Any]
) -> None:
    tools = [{"type": "web_search_20250305", "name": "web_search"}]

    response = await gateway.post(path, model=MODEL, tools=tools, **body)

    assert response.status_code == 200
    assert response.headers["x-warren-ignored-tools"] == "web_search_20250305"


async def test_what_is_left_out_is_fit_for_a_header(gateway: LiveGateway) -> None:
    kinds = ["a\r\nb: c", "é" * 100, *(f"kind{k}" for k in range(40))]

    response = await gateway.chat(tools=[{"type": kind} for kind in kinds])

    names = response.headers["x-warren-ignored-tools"].split(", ")
    assert names[:2] == ["_" * 64, "a__b__c"]
    assert len(names) == 16


async def test_a_broken_schema_of_a_call_that_is_required_is_named(gateway: LiveGateway) -> None:
    broken = {"type": "function", "function": {"name": "f", "parameters": {"properties": 3}}}

    response = await gateway.chat(tools=[TOOL, broken], tool_choice="required")

    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tools[1].function.parameters")
    assert "get_weather" not in error["message"]


async def test_no_tools_are_offered_where_none_may_be_called(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    response = await gateway.chat(tools=[TOOL], tool_choice="none")

    prompt = worker.jobs[0].job.prompts[0]
    assert isinstance(prompt, ChatPrompt)
    assert prompt.tools == ()
    assert CALL in response.json()["choices"][0]["message"]["content"]


async def test_functions_are_called_in_their_older_form(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    functions: Any = [TOOL["function"]]
    chats = gateway.openai.chat.completions
    whole = (await chats.create(model=MODEL, messages=USER, functions=functions)).choices[0]
    stream = await chats.create(model=MODEL, messages=USER, functions=functions, stream=True)
    chunks = [chunk.choices[0] async for chunk in stream]

    assert (whole.finish_reason, chunks[-1].finish_reason) == ("function_call", "function_call")
    assert whole.message.tool_calls is None
    assert whole.message.content == "Let me see."
    assert whole.message.function_call is not None
    assert whole.message.function_call.name == "get_weather"
    assert whole.message.function_call.arguments == '{"city": "Rome"}'
    parts = [chunk.delta.function_call for chunk in chunks if chunk.delta.function_call]
    assert [part.name for part in parts if part.name] == ["get_weather"]
    assert "".join(part.arguments or "" for part in parts) == '{"city": "Rome"}'


async def test_functions_and_what_they_said_reach_the_template(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    call = {"name": "get_weather", "arguments": "{}"}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "get_weather", "content": "rain"},
    ]

    await gateway.post(
        "/v1/chat/completions",
        model=MODEL,
        messages=messages,
        functions=[TOOL["function"]],
        function_call={"name": "get_weather"},
    )

    job = worker.jobs[0].job
    prompt = job.prompts[0]
    assert isinstance(prompt, ChatPrompt)
    assert [tool.name for tool in prompt.tools] == ["get_weather"]
    _, assistant, result = prompt.messages
    assert [(one.name, one.arguments) for one in assistant.tool_calls] == [("get_weather", "{}")]
    assert (result.role, result.content) == ("tool", "rain")
    assert result.tool_call_id == assistant.tool_calls[0].id
    assert job.sampling.constraint is not None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"functions": [TOOL["function"]], "tools": [TOOL]}, "tools"),
        ({"functions": [TOOL["function"]], "function_call": {"name": "f"}}, "function_call"),
        ({"function_call": {"name": "f"}}, "function_call"),
    ],
)
async def test_functions_that_cannot_be_called_are_refused(
    gateway: LiveGateway, body: dict[str, Any], param: str
) -> None:
    refused = await gateway.chat(**body)

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
