"""OpenAI's Agents SDK, over responses and over chat completions."""

import asyncio
from contextlib import suppress
from typing import Any

from agents import (  # type: ignore[import-not-found]
    Agent,
    MaxTurnsExceeded,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

from tests.clients.checks import ANSWER, CAPITAL, equal, run, target
from tests.clients.weather import ANSWERING, ASKING, CALLING, Weather, is_sunny, one_call, weather

TARGET = target()
SETTINGS = ModelSettings(temperature=0, max_tokens=48)
KINDS = (OpenAIResponsesModel, OpenAIChatCompletionsModel)
TOOL = function_tool(weather)
set_tracing_disabled(True)


def ran(question: str, kind: Any, max_turns: int = 2, **options: Any) -> Any:
    async def ask() -> Any:
        return await Runner.run(agent(kind, **options), question, max_turns=max_turns)

    return asyncio.run(ask())


def agent(kind: Any, **options: Any) -> Any:
    client = AsyncOpenAI(base_url=f"{TARGET.url}/v1", api_key=TARGET.api_key, max_retries=0)
    model = kind(TARGET.model, openai_client=client)
    return Agent("assistant", model=model, model_settings=SETTINGS, **options)


def check_answer() -> None:
    for kind in KINDS:
        equal(ran(CAPITAL, kind).final_output, ANSWER)


def check_answer_streamed() -> None:
    async def ask(kind: Any) -> tuple[str, str]:
        result, text = Runner.run_streamed(agent(kind), CAPITAL), ""
        async for event in result.stream_events():
            if event.type == "raw_response_event":
                text += getattr(event.data, "delta", "")
        return text, result.final_output

    for kind in KINDS:
        equal(asyncio.run(ask(kind)), (ANSWER, ANSWER))


def check_agent_calls_a_tool() -> None:
    for kind in KINDS:
        with one_call():
            answer = ran(CALLING, kind, tools=[TOOL]).final_output
        is_sunny(answer)


def check_output_by_json_schema() -> None:
    for kind in KINDS:
        assert isinstance(ran(ASKING, kind, output_type=Weather).final_output, Weather)


def check_agent_with_a_tool_answers_by_json_schema() -> None:
    for kind in KINDS:
        answer = ran(ANSWERING, kind, tools=[TOOL], output_type=Weather).final_output
        assert isinstance(answer, Weather)


def check_agent_with_a_json_schema_calls_a_tool() -> None:
    for kind in KINDS:
        with one_call(), suppress(MaxTurnsExceeded):
            ran(CALLING, kind, 1, tools=[TOOL], output_type=Weather)


def check_next_turn_continues_the_stored_response() -> None:
    async def ask() -> Any:
        stored = agent(OpenAIResponsesModel)
        first = await Runner.run(stored, CAPITAL)
        return first, await Runner.run(
            stored, "And of Italy?", previous_response_id=first.last_response_id
        )

    first, second = asyncio.run(ask())

    grown = second.raw_responses[0].usage.input_tokens - first.raw_responses[0].usage.input_tokens
    assert grown > 8, grown


if __name__ == "__main__":
    run(globals())
