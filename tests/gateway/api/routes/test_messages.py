"""Anthropic's Messages API, through its official client."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import MessageParam, ToolParam

from gateway.intake.keys.key_file import KeyFile
from shared.bus.memory import MemoryBus
from shared.messages import ChatPrompt, Tokenized, TokenizeJob, ToolCall
from tests.support.deployment.processes import NO_TLS
from tests.support.gateway.http import LiveGateway, live_gateway, skip
from tests.support.models.grammars import matches
from tests.support.workers.scripted_worker import (
    MODEL,
    ScriptedJob,
    ScriptedWorker,
    start_only,
    wait_before_the_end,
)

USER: list[MessageParam] = [{"role": "user", "content": "one two"}]
TOOL: ToolParam = {
    "name": "get_weather",
    "description": "The weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
PATH = "/v1/messages"


@pytest.fixture
def parsers() -> dict[str, str]:
    return {"tool_parser": "hermes", "reasoning_parser": "qwen3"}


@pytest.fixture
async def client(gateway: LiveGateway) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with client_of(gateway) as client:
        yield client


def client_of(gateway: LiveGateway, api_key: str = "none") -> anthropic.AsyncAnthropic:
    http = anthropic.DefaultAsyncHttpxClient(verify=NO_TLS)
    return anthropic.AsyncAnthropic(
        base_url=gateway.url, api_key=api_key, max_retries=0, http_client=http
    )


def saying(*tokens: str) -> Any:
    async def say(job: ScriptedJob) -> None:
        await job.start()
        for token in tokens:
            await job.say(token)
        await job.finish()

    return say


def prompt_of(worker: ScriptedWorker) -> ChatPrompt:
    prompt = worker.jobs[-1].job.prompts[0]
    assert isinstance(prompt, ChatPrompt)
    return prompt


async def test_a_message_comes_whole(client: anthropic.AsyncAnthropic) -> None:
    message = await client.messages.create(model=MODEL, max_tokens=9, messages=USER)

    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "one two"}]
    assert (message.stop_reason, message.role, message.model) == ("end_turn", "assistant", MODEL)
    assert (message.usage.input_tokens, message.usage.output_tokens) == (2, 2)
    assert message.id.startswith("msg_")
    assert message._request_id == message.id


async def test_a_message_is_streamed(client: anthropic.AsyncAnthropic) -> None:
    async with client.messages.stream(model=MODEL, max_tokens=9, messages=USER) as stream:
        kinds = [event.type async for event in stream]
        message = await stream.get_final_message()

    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "one two"}]
    assert message.stop_reason == "end_turn"
    assert kinds == [
        "message_start",
        "content_block_start",
        *["content_block_delta", "text"] * 2,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


async def test_thoughts_and_calls_are_the_same_streamed_and_whole(
    client: anthropic.AsyncAnthropic, worker: ScriptedWorker
) -> None:
    worker.script = saying(*f"<think>\nhm\n</think>\n\nLet me see.\n{CALL}\n{CALL}")
    body: Any = {
        "model": MODEL,
        "max_tokens": 99,
        "messages": USER,
        "tools": [TOOL],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }

    whole = await client.messages.create(**body)
    async with client.messages.stream(**body) as stream:
        streamed = await stream.get_final_message()

    for message in (whole, streamed):
        assert message.stop_reason == "tool_use"
        kinds = [block.type for block in message.content]
        assert kinds == ["thinking", "text", "tool_use", "tool_use"]
        blocks: list[Any] = list(message.content)
        thought, text, call, _ = blocks
        assert (thought.thinking, text.text) == ("hm", "Let me see.")
        assert (call.name, call.input) == ("get_weather", {"city": "Rome"})


async def test_thoughts_that_are_not_wanted_are_left_out(
    client: anthropic.AsyncAnthropic, worker: ScriptedWorker
) -> None:
    worker.script = saying("<think>\nhm\n</think>\n\nNo.")

    message = await client.messages.create(model=MODEL, max_tokens=9, messages=USER)

    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "No."}]
    assert prompt_of(worker).template_kwargs == {"enable_thinking": False}


async def test_a_conversation_reaches_the_template(
    client: anthropic.AsyncAnthropic, worker: ScriptedWorker
) -> None:
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "See."},
                {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"a": 1}},
                {"type": "tool_use", "id": "toolu_2", "name": "get_weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"},
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_2",
                    "is_error": True,
                    "content": [{"type": "text", "text": "none"}],
                },
                {"type": "text", "text": "one"},
            ],
        },
        {"role": "user", "content": "two"},
    ]

    await client.messages.create(
        model=MODEL, max_tokens=9, system="Be brief.", messages=messages, tools=[TOOL]
    )

    prompt = prompt_of(worker)
    told = [(message.role, message.content, message.tool_call_id) for message in prompt.messages]
    assert told == [
        ("system", "Be brief.", None),
        ("user", "a\nb", None),
        ("assistant", "See.", None),
        ("tool", "rain", "toolu_1"),
        ("tool", "none", "toolu_2"),
        ("user", "one\ntwo", None),
    ]
    assert prompt.messages[2].reasoning_content == "hm"
    assert prompt.messages[2].tool_calls == (
        ToolCall(id="toolu_1", name="get_weather", arguments='{"a":1}'),
        ToolCall(id="toolu_2", name="get_weather", arguments="{}"),
    )
    assert [(tool.name, tool.description) for tool in prompt.tools] == [
        ("get_weather", "The weather.")
    ]


async def test_many_turns_of_one_role_are_one_message(
    client: anthropic.AsyncAnthropic, worker: ScriptedWorker
) -> None:
    """Empty texts leave no empty lines."""
    thoughts = [{"type": "thinking", "thinking": text, "signature": ""} for text in ("a", "", "é")]
    call = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}
    contents: list[Any] = ["", "one", [thoughts[0], call], [thoughts[1]], [thoughts[2]], "", "two"]
    turns = [{"role": "assistant", "content": content} for content in contents * 50]
    messages: Any = [*USER, *turns, {"role": "user", "content": ""}, *USER]

    await client.messages.create(model=MODEL, max_tokens=9, messages=messages)

    asked, said, answered = prompt_of(worker).messages
    assert (asked.content, answered.content) == ("one two", "one two")
    assert said.content == "\n".join(["one", "two"] * 50)
    assert said.reasoning_content == "\n".join(["a", "é"] * 50)
    assert said.tool_calls == (ToolCall(id="toolu_1", name="f", arguments="{}"),) * 50


async def test_a_message_that_the_assistant_has_begun_is_continued(
    client: anthropic.AsyncAnthropic, worker: ScriptedWorker
) -> None:
    begun: list[MessageParam] = [*USER, {"role": "assistant", "content": "The answer is ("}]

    await client.messages.create(model=MODEL, max_tokens=9, messages=begun)

    prompt = prompt_of(worker)
    assert (prompt.continue_final_message, prompt.add_generation_prompt) == (True, False)


async def test_parameters_reach_the_worker(
    client: anthropic.AsyncAnthropic, worker: ScriptedWorker
) -> None:
    worker.script = saying("one ")

    await client.messages.create(
        model=MODEL,
        max_tokens=7,
        messages=USER,
        stop_sequences=["END", "\n\n"],
        metadata={"user_id": "u"},
        extra_body={
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 5,
            "seed": 3,
            "output_config": {
                "effort": "low",
                "format": {"type": "json_schema", "schema": {"type": "object"}},
            },
        },
    )

    sampling = worker.jobs[0].job.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (7, 0.5, 0.9)
    assert (sampling.top_k, sampling.seed, sampling.stop) == (5, 3, ("END", "\n\n"))
    assert sampling.constraint is not None
    assert prompt_of(worker).template_kwargs["reasoning_effort"] == "low"


async def test_a_stop_sequence_is_named(
    client: anthropic.AsyncAnthropic, worker: ScriptedWorker
) -> None:
    async def stop(job: ScriptedJob) -> None:
        await job.start()
        await job.finish("one ", stop_reason="END")

    worker.script = stop

    message = await client.messages.create(
        model=MODEL, max_tokens=9, messages=USER, stop_sequences=["END"]
    )

    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")


@pytest.mark.parametrize(
    "choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}], ids=["any", "tool"]
)
async def test_a_call_that_is_required_is_a_constraint(
    client: anthropic.AsyncAnthropic, worker: ScriptedWorker, choice: Any
) -> None:
    worker.script = saying(CALL)

    message = await client.messages.create(
        model=MODEL, max_tokens=9, messages=USER, tools=[TOOL], tool_choice=choice
    )

    constraint = worker.jobs[0].job.sampling.constraint
    assert constraint is not None
    assert matches(constraint, CALL)
    assert not matches(constraint, "It rains.")
    assert message.stop_reason == "tool_use"


async def test_calls_may_be_limited_to_one(
    client: anthropic.AsyncAnthropic, worker: ScriptedWorker
) -> None:
    worker.script = saying(CALL, "\n", CALL)
    choice: Any = {"type": "auto", "disable_parallel_tool_use": True}

    message = await client.messages.create(
        model=MODEL, max_tokens=9, messages=USER, tools=[TOOL], tool_choice=choice
    )

    assert [block.type for block in message.content] == ["tool_use"]


async def test_no_tools_are_offered_where_none_may_be_called(
    client: anthropic.AsyncAnthropic, worker: ScriptedWorker
) -> None:
    await client.messages.create(
        model=MODEL, max_tokens=9, messages=USER, tools=[TOOL], tool_choice={"type": "none"}
    )

    assert prompt_of(worker).tools == ()


async def test_tokens_are_counted_as_a_message_would_have_them(
    client: anthropic.AsyncAnthropic, worker: ScriptedWorker
) -> None:
    asked: list[TokenizeJob] = []

    def count(job: Any) -> Tokenized:
        asked.append(job)
        return Tokenized(request_id=job.request_id, token_ids=(1, 2, 3), tokens=(), max_seq_len=9)

    worker.quick_script = count
    body: Any = {"model": MODEL, "system": "Be brief.", "messages": USER, "tools": [TOOL]}

    counted = await client.messages.count_tokens(**body)
    await client.messages.create(max_tokens=9, **body)

    assert counted.input_tokens == 3
    assert asked[0].prompt == prompt_of(worker)


CLAUDE_CODE: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 32000,
    "stream": True,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.330; cch=1a2b3;"},
        {
            "type": "text",
            "text": "You are Claude Code.",
            "cache_control": {"type": "ephemeral", "ttl": "1h"},
        },
        {"type": "text", "text": "Be concise.", "cache_control": {"type": "ephemeral"}},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>Today.</system-reminder>"},
                {"type": "text", "text": "one two", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {"role": "system", "content": "<system-reminder>Plan mode.</system-reminder>"},
    ],
    "tools": [
        *(
            {
                "name": f"Tool{k}",
                "description": "A tool.",
                "input_schema": {
                    "$schema": "https://json-schema.org/draft/2020-12/schema",
                    "type": "object",
                    "properties": {"command": {"type": "string"}},
                    "required": ["command"],
                    "additionalProperties": False,
                },
                "eager_input_streaming": True,
            }
            for k in range(40)
        ),
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "metadata": {"user_id": '{"device_id":"d","account_uuid":"","session_id":"s"}'},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "temperature": 1,
}
CLAUDE_CODE_HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
    "anthropic-dangerous-direct-browser-access": "true",
    "x-app": "cli",
    "x-stainless-helper-method": "stream",
}


async def test_claude_codes_requests_are_served(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    response = await gateway.http.post(
        f"{PATH}?beta=true", json=CLAUDE_CODE, headers=CLAUDE_CODE_HEADERS
    )

    assert response.status_code == 200, response.text
    assert response.headers["x-warren-ignored-tools"] == "web_search_20250305"
    assert worker.jobs[0].job.sampling.clamp_max_tokens
    prompt = prompt_of(worker)
    assert [(message.role, message.content) for message in prompt.messages] == [
        ("system", "You are Claude Code.\nBe concise."),
        (
            "user",
            "<system-reminder>Today.</system-reminder>\none two\n"
            "<system-reminder>Plan mode.</system-reminder>",
        ),
    ]
    assert len(prompt.tools) == 40
    assert prompt.template_kwargs == {"enable_thinking": True, "reasoning_effort": "high"}


async def test_a_stream_is_resumed_in_the_same_bytes(gateway: LiveGateway) -> None:
    body = {"model": MODEL, "max_tokens": 9, "messages": USER, "stream": True, "detach": True}
    whole = await gateway.post(PATH, **body)
    ids = re.findall(r"^id: (\S+)$", whole.text, re.MULTILINE)
    path = f"/v1/streams/{whole.headers['request-id']}"

    again = (await gateway.http.get(path)).text
    rest = (await gateway.http.get(path, headers={"last-event-id": ids[2]})).text

    assert again == whole.text
    assert whole.text.endswith(rest)
    assert rest.count("event: ") == whole.text.count("event: ") - 3


async def test_a_client_that_leaves_takes_its_work_with_it(
    client: anthropic.AsyncAnthropic, worker: ScriptedWorker
) -> None:
    worker.script = start_only
    async with client.messages.stream(model=MODEL, max_tokens=9, messages=USER) as stream:
        await anext(aiter(stream))

    await worker.wait_cancelled(worker.jobs[0].job.request_id)


async def test_an_idle_stream_is_pinged_with_events(bus: MemoryBus, worker: ScriptedWorker) -> None:
    may_end = wait_before_the_end(worker, last="one")
    body = {"model": MODEL, "max_tokens": 9, "messages": USER, "stream": True}
    async with live_gateway(bus, ping_interval_s=0.05) as gateway:
        received = ""
        async with gateway.http.stream("POST", PATH, json=body) as response:
            async for text in response.aiter_text():
                received += text
                if 'event: ping\ndata: {"type": "ping"}\n\n' in received:
                    may_end.set()

    assert received.rstrip().endswith('{"type":"message_stop"}')


def checked(response: httpx.Response) -> tuple[int, str]:
    """The status and type of an error, which has Anthropic's shape."""
    body = response.json()
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    assert body["request_id"] == response.headers["request-id"]
    return response.status_code, body["error"]["type"]


ASK: dict[str, Any] = {"model": MODEL, "max_tokens": 9, "messages": USER}
IMAGE: dict[str, Any] = {"type": "image", "source": {"type": "url", "url": "x"}}
RESULT: dict[str, Any] = {"type": "tool_result", "tool_use_id": "t"}
BROKEN: dict[str, Any] = {"name": "f", "input_schema": {"properties": 3}}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": [RESULT]}]}, "messages[0].content[0].type"),
        ({"stop": "END"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tool_choice": {"type": "tool"}, "tools": [TOOL]}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [TOOL]}, "tool_choice"),
        ({"tools": [BROKEN], "tool_choice": {"type": "any"}}, "tools[0].input_schema"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"temperature": 3}, "temperature"),
    ],
)
async def test_a_bad_request_names_its_part(
    gateway: LiveGateway, change: dict[str, Any], named: str
) -> None:
    response = await gateway.post(PATH, **{**ASK, **change})

    assert checked(response) == (400, "invalid_request_error")
    assert named in response.json()["error"]["message"]


async def test_errors_of_the_route_have_anthropics_shape(gateway: LiveGateway) -> None:
    unknown = await gateway.post(PATH, **{**ASK, "model": "gpt-5"})
    method = await gateway.http.get(PATH)
    path = await gateway.post(f"{PATH}/batches", **ASK)
    media = await gateway.http.post(PATH, content=b"{}", headers={"content-type": "text/plain"})
    host = await gateway.http.post(PATH, json=ASK, headers={"host": "evil.example"})

    assert checked(unknown) == (404, "not_found_error")
    assert checked(method) == (405, "invalid_request_error")
    assert checked(path) == (404, "not_found_error")
    assert checked(media) == (415, "invalid_request_error")
    assert checked(host) == (403, "permission_error")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("context_length_exceeded", (400, "invalid_request_error")),
        ("rate_limit_exceeded", (429, "rate_limit_error")),
        ("worker_lost", (500, "api_error")),
        ("service_unavailable", (503, "overloaded_error")),
        ("out_of_memory", (503, "overloaded_error")),
        ("deadline_exceeded", (504, "timeout_error")),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_errors_of_a_job_have_anthropics_shape(
    gateway: LiveGateway, worker: ScriptedWorker, code: str, expected: tuple[int, str], stream: bool
) -> None:
    async def fail(job: ScriptedJob) -> None:
        await job.start()
        await job.fail(code, "Sorry.")

    worker.script = fail

    response = await gateway.post(PATH, **ASK, stream=stream)

    assert checked(response) == expected
    if code == "context_length_exceeded":
        assert response.json()["error"]["message"] == "prompt is too long: Sorry."


async def test_a_body_that_is_too_long_is_named(bus: MemoryBus, worker: ScriptedWorker) -> None:
    async with live_gateway(bus, max_body_bytes=100) as gateway:
        response = await gateway.post(PATH, **ASK, system="x" * 100)

    assert checked(response) == (413, "request_too_large")


async def test_a_stream_that_fails_ends_with_an_error_event(
    client: anthropic.AsyncAnthropic, worker: ScriptedWorker
) -> None:
    async def fail(job: ScriptedJob) -> None:
        await job.start()
        await job.say("one ")
        await job.fail("worker_lost", "gone")

    worker.script = fail

    with pytest.raises(anthropic.APIStatusError) as caught:
        async with client.messages.stream(model=MODEL, max_tokens=9, messages=USER) as stream:
            await stream.until_done()

    assert isinstance(caught.value.body, dict)
    assert caught.value.body["error"]["type"] == "api_error"


async def test_a_stream_that_fails_before_its_first_event_ends_with_an_error_event(
    bus: MemoryBus, worker: ScriptedWorker
) -> None:
    worker.script = lambda job: asyncio.Event().wait()  # type: ignore[assignment,return-value]
    body = {**ASK, "stream": True, "timeout": 60}
    async with (
        live_gateway(bus, first_event_timeout_s=0.05) as gateway,
        gateway.http.stream("POST", PATH, json=body) as response,
    ):
        skip(60)
        await response.aread()

    *pings, error, _ = response.text.split("\n\n")
    assert set(pings) <= {'event: ping\ndata: {"type": "ping"}'}
    kind, data = error.split("\n")
    assert kind == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["type"] == "timeout_error"


async def test_the_key_is_in_anthropics_header(
    bus: MemoryBus, worker: ScriptedWorker, tmp_path: Path
) -> None:
    key = KeyFile(tmp_path / "keys").add("alice")
    async with live_gateway(bus, keys_file=tmp_path / "keys") as gateway:
        async with client_of(gateway, key) as client:
            await client.messages.create(model=MODEL, max_tokens=9, messages=USER)
        async with client_of(gateway, "wrong") as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(model=MODEL, max_tokens=9, messages=USER)
        refused = await gateway.post(PATH, **ASK)

    assert worker.jobs[0].job.tenant == "alice"
    assert checked(refused) == (401, "authentication_error")


async def test_a_message_that_another_worker_goes_on_with_has_the_same_bytes(
    gateway: LiveGateway, worker: ScriptedWorker, worker_bus: MemoryBus
) -> None:
    may_die = False

    async def speak(job: ScriptedJob) -> None:
        await job.start()
        if job.is_first:
            await job.say("<think>\nhm")
        if may_die and job.is_first:
            worker_bus.sever()
            await asyncio.Event().wait()
        await job.say("\n</think>\n\n")
        await job.finish("No.")

    worker.script = speak
    body = {**ASK, "stream": True, "thinking": {"type": "adaptive"}}

    undisturbed = (await gateway.post(PATH, **body)).text
    await worker.wait_settled()
    may_die = True
    taken_over = (await gateway.post(PATH, **body)).text

    assert len(worker.jobs) == 3
    assert without_ids(taken_over) == without_ids(undisturbed)
    assert "No." in taken_over


def without_ids(text: str) -> str:
    """The text without ids and signatures, which differ between requests."""
    return re.sub(r"msg_[0-9a-f]{32}|[0-9a-f]{64}", "", text)
