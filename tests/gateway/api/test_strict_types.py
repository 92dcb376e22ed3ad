"""Generated answers have the types of OpenAI's and Anthropic's packages, with nothing missing,
nothing added and nothing of another type."""

import asyncio
from collections.abc import Mapping
from functools import partial
from itertools import product
from typing import Any

import httpx
import pytest

from shared.messages import Failed, Logprob, PromptScores, TokenLogprobs
from tests.support.gateway.http import LiveGateway
from tests.support.strictness.answers import faults
from tests.support.workers.scripted_worker import MODEL, Script, ScriptedJob, words

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TEXTS = {
    "nothing": "",
    "text": "one two",
    "thought": "<think>hm</think>one",
    "call": f"Sure.{CALL}",
    "calls": f"<think>hm</think>{CALL}\n{CALL}",
    "custom": '<tool_call>\n{"name": "p", "arguments": {"input": "a\\nb"}}\n</tool_call>',
    "rest": "<think>hm</think>Sure." + CALL[:50],
}
"""What the worker writes if the prompt names it, and how that ends."""
PROMPTS = [
    "nothing stop",
    "text length",
    "text word",
    "text refusal",
    "thought stop",
    "call stop",
    "calls stop",
    "custom stop",
    "rest length",
    "rest failure",
]
ENDS = ["text length", "thought stop", "calls stop", "rest failure"]
"""A case for each way in which an answer may end."""

FUNCTION: dict[str, Any] = {
    "name": "f",
    "description": "Does it.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
TOOLS: dict[str, Any] = {"tools": [{"type": "function", "function": FUNCTION}]}
NAMED = {"type": "function", "function": {"name": "f"}}
FLAT_TOOLS: dict[str, Any] = {"tools": [{"type": "function", "strict": True, **FUNCTION}]}
FLAT_NAMED = {"type": "function", "name": "f"}
SCHEMA = {"type": "object", "properties": {}, "additionalProperties": False}
USAGE = {"stream_options": {"include_usage": True}}

CHATS: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "choices": {"n": 3, **USAGE},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "tools": {**TOOLS, **USAGE},
    "tools and logprobs": {**TOOLS, "logprobs": True},
    "required": {**TOOLS, "tool_choice": "required"},
    "custom tools": {"tools": [{"type": "custom", "custom": {"name": "p"}}], **USAGE},
    "one call": {**TOOLS, "tool_choice": NAMED, "parallel_tool_calls": False},
    "functions": {"functions": [FUNCTION]},
    "format": {"response_format": {"type": "json_object"}, **TOOLS},
    "usage in all chunks": {
        "stream_options": {"include_usage": True, "continuous_usage_stats": True}
    },
    "obfuscation": {"stream_options": {"include_obfuscation": True}},
    "no reasoning": {"include_reasoning": False},
    "detached": {"detach": True, "metadata": {"a": "b"}, "service_tier": "flex"},
    "token ids": {"logprobs": True, "return_tokens_as_token_ids": True},
}
COMPLETIONS: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "choices": {"n": 2, **USAGE},
    "best": {"n": 1, "best_of": 2},
    "logprobs": {"logprobs": 2},
    "echo": {"echo": True},
    "echo and logprobs": {"echo": True, "logprobs": 1},
    "obfuscation": {"stream_options": {"include_obfuscation": True}},
}
RESPONSES: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "tools": {**FLAT_TOOLS, "tool_choice": "auto", "instructions": "Be brief."},
    "required": {**FLAT_TOOLS, "tool_choice": "required", "max_tool_calls": 3},
    "one call": {**FLAT_TOOLS, "tool_choice": FLAT_NAMED, "parallel_tool_calls": False},
    "allowed": {
        **FLAT_TOOLS,
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [FLAT_NAMED]},
    },
    "bare tool": {"tools": [{"type": "function", "name": "f"}], "tool_choice": NAMED},
    "custom tools": {"tools": [{"type": "custom", "name": "p"}]},
    "other tools": {"tools": [{"type": "web_search"}, {"type": "custom", "name": "c"}]},
    "logprobs": {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    "sampling": {"temperature": 0, "top_p": 1, "max_output_tokens": 5, "user": "u"},
    "words": {"metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k"},
    "format": {
        "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
        **FLAT_TOOLS,
    },
    "verbosity": {"text": {"verbosity": "low"}, "reasoning": {"effort": "low"}},
    "reasoning": {"reasoning": {"effort": "low", "summary": "auto"}},
    "flex": {"service_tier": "flex", "store": False},
    "truncation": {"truncation": "auto", "stream_options": {"include_obfuscation": True}},
    "stored": {"store": True},
}
MESSAGES: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "thinking": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    "tools": {
        "tools": [{"name": "f", "input_schema": FUNCTION["parameters"]}],
        "thinking": {"type": "adaptive"},
    },
    "any": {
        "tools": [{"name": "f", "input_schema": FUNCTION["parameters"]}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    },
    "stop": {"stop_sequences": ["x"], "service_tier": "auto", "metadata": {"user_id": "u"}},
}
ECHOED = [
    ("/v1/chat/completions", "detached"),
    *(("/v1/responses", name) for name in ("sampling", "words", "verbosity", "flex", "stored")),
]
"""Cases whose parameters the answer only repeats."""
CASES = [
    *(("/v1/chat/completions", name) for name in CHATS),
    *(("/v1/completions", name) for name in COMPLETIONS),
    *(("/v1/responses", name) for name in RESPONSES),
    *(("/v1/messages", name) for name in MESSAGES),
]


def bodies(path: str, name: str) -> list[dict[str, Any]]:
    """The bodies of a case, for everything that the worker may write, whole and as a stream."""
    made: list[dict[str, Any]] = []
    prompts = ENDS if (path, name) in ECHOED else PROMPTS
    for prompt, stream in product(prompts, (False, True)):
        messages = [{"role": "user", "content": prompt}]
        match path:
            case "/v1/chat/completions":
                body = {"messages": messages, **CHATS[name]}
            case "/v1/completions":
                body = {"prompt": [prompt, prompt], **COMPLETIONS[name]}
            case "/v1/responses":
                body = {"input": prompt, **RESPONSES[name]}
            case _:
                body = {"messages": messages, "max_tokens": 9, **MESSAGES[name]}
        if not stream and path != "/v1/responses":
            body.pop("stream_options", None)
        if not (stream and "best_of" in body):
            made.append({"model": MODEL, "stream": stream, **body})
    return made


def scores(text: str, depth: int | None) -> tuple[TokenLogprobs, ...]:
    if depth is None:
        return ()
    chosen = Logprob(len(text), -2.0, text.encode())
    return (TokenLogprobs(chosen=chosen, top=(Logprob(99, -1.0, b"best"), chosen)[:depth]),)


async def write_what_is_named(may_fail: asyncio.Event, job: ScriptedJob) -> None:
    """Answer a prompt of `PROMPTS`."""
    sampling, prompts = job.job.sampling, job.job.prompts
    told = [words(prompt) for prompt in prompts]
    text, end = TEXTS[told[0][0]], told[0][1]
    if end == "refusal":
        return await job.publish(Failed(code="context_length_exceeded", message="Too long."))
    await job.start()
    if (depth := sampling.prompt_logprobs) is not None:
        for number, tokens in enumerate(told):
            scored = [None, *(scores(token, depth)[0] for token in tokens[1:])]
            await job.publish(
                PromptScores(
                    prompt=number,
                    attempt=1,
                    start=0,
                    token_ids=tuple(map(len, tokens)),
                    logprobs=tuple(scored),
                )
            )
    for choice in range(job.job.total_choices):
        for k in range(0, len(text), 5):
            part = text[k : k + 5]
            logprobs = scores(part, sampling.logprobs)
            await job.publish(job.log.delta(choice, [len(part)], part, logprobs=logprobs))
    if end == "failure":
        await may_fail.wait()
        return await job.fail("internal_error", "Broken.")
    for choice in range(job.job.total_choices):
        await job.finish(
            choice=choice,
            reason="length" if end == "length" else "stop",
            stop_reason="x" if end == "word" else None,
        )
    return None


async def ask(
    gateway: LiveGateway, may_fail: asyncio.Event, path: str, body: dict[str, Any]
) -> httpx.Response:
    """A stream fails only once it has begun."""
    if body["stream"]:
        may_fail.clear()
    else:
        may_fail.set()
    async with gateway.http.stream("POST", path, json=body) as answer:
        may_fail.set()
        await answer.aread()
    return answer


@pytest.fixture
def may_fail() -> asyncio.Event:
    return asyncio.Event()


@pytest.fixture
def worker_script(may_fail: asyncio.Event) -> Script:
    return partial(write_what_is_named, may_fail)


@pytest.fixture
def parsers() -> dict[str, str]:
    return {"tool_parser": "hermes", "reasoning_parser": "qwen3"}


@pytest.mark.parametrize(("path", "name"), CASES)
async def test_whatever_the_model_writes_is_answered_in_the_types_of_the_clients(
    gateway: LiveGateway, may_fail: asyncio.Event, path: str, name: str
) -> None:
    answers = [await ask(gateway, may_fail, path, body) for body in bodies(path, name)]

    assert {answer.status_code for answer in answers} <= {200, 400, 500}
    assert {fault: data for answer in answers for fault, data in faults(answer).items()} == {}
