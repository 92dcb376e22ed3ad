"""Answers of gpt-oss over HTTP, through the official client."""

from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessageFunctionToolCall

from shared.messages import ChatPrompt
from tests.support.gateway.http import LiveGateway
from tests.support.gateway.tool_calls import WEATHER
from tests.support.models.grammars import matches
from tests.support.workers.scripted_worker import MODEL, Script, ScriptedJob, ScriptedWorker

THOUGHT = "<|channel|>analysis<|message|>They ask.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Rome"}'
TOOL: Any = WEATHER
ASKED: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Weather?"}]}


def says(text: str) -> Script:
    async def script(job: ScriptedJob) -> None:
        await job.start()
        for char in text:
            await job.say(char)
        await job.finish()

    return script


@pytest.fixture
def worker_script() -> Script:
    return says(f"{THOUGHT}<|channel|>final<|message|>It rains.")


@pytest.fixture
def parsers() -> dict[str, str]:
    return {"tool_parser": "harmony", "reasoning_parser": "harmony"}


@pytest.mark.parametrize("tools", [[], [TOOL]])
async def test_the_final_channel_is_the_content(
    gateway: LiveGateway, worker: ScriptedWorker, tools: Any
) -> None:
    client = gateway.openai.chat.completions

    whole = await client.create(**ASKED, tools=tools, reasoning_effort="high")
    stream = await client.create(**ASKED, tools=tools, stream=True)
    deltas = [chunk.choices[0].delta async for chunk in stream]

    message = whole.choices[0].message
    assert message.content == "It rains."
    assert message.model_extra == {"reasoning_content": "They ask."}
    assert "".join(delta.content or "" for delta in deltas) == "It rains."
    thoughts = [(delta.model_extra or {}).get("reasoning_content", "") for delta in deltas]
    assert "".join(thoughts) == "They ask."
    job = worker.jobs[0].job
    assert isinstance(job.prompts[0], ChatPrompt)
    assert job.prompts[0].template_kwargs == {"reasoning_effort": "high"}
    assert not job.sampling.skip_special_tokens


async def test_what_is_said_to_a_function_is_a_call(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    worker.script = says(THOUGHT + CALL)
    flat: Any = {"type": "function", **TOOL["function"]}

    whole = await gateway.openai.chat.completions.create(**ASKED, tools=[TOOL])
    response = await gateway.openai.responses.create(model=MODEL, input="Weather?", tools=[flat])

    choice = whole.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert choice.message.tool_calls is not None
    call = choice.message.tool_calls[0]
    assert isinstance(call, ChatCompletionMessageFunctionToolCall)
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Rome"}')
    assert [item.type for item in response.output] == ["reasoning", "function_call"]
    assert response.usage is not None
    thought = len(THOUGHT.removesuffix("<|start|>assistant"))
    assert response.usage.output_tokens_details.reasoning_tokens == thought


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
async def test_a_required_call_may_follow_a_thought(
    gateway: LiveGateway, worker: ScriptedWorker, choice: Any
) -> None:
    worker.script = says(THOUGHT + CALL)

    whole = await gateway.openai.chat.completions.create(**ASKED, tools=[TOOL], tool_choice=choice)

    constraint = worker.jobs[0].job.sampling.constraint
    assert constraint is not None
    assert matches(constraint, THOUGHT + CALL)
    assert not matches(constraint, f"{THOUGHT}<|channel|>final<|message|>It rains.")
    assert whole.choices[0].finish_reason == "tool_calls"


async def test_a_format_is_one_of_the_final_channel(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    await gateway.openai.chat.completions.create(**ASKED, response_format={"type": "json_object"})

    constraint = worker.jobs[0].job.sampling.constraint
    assert constraint is not None
    assert matches(constraint, f"{THOUGHT}<|channel|>final<|message|>{{}}")
    assert not matches(constraint, "{}")
