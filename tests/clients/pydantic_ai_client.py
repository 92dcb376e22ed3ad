"""pydantic-ai: agents over chat completions and over responses."""

import asyncio
from contextlib import suppress
from typing import Any

from pydantic_ai import (  # type: ignore[import-not-found]
    Agent,
    NativeOutput,
    UsageLimitExceeded,
    UsageLimits,
)
from pydantic_ai.models.openai import (  # type: ignore[import-not-found]
    OpenAIChatModel,
    OpenAIResponsesModel,
)
from pydantic_ai.providers.openai import OpenAIProvider  # type: ignore[import-not-found]

from tests.clients.checks import ANSWER, CAPITAL, equal, run, target
from tests.clients.weather import ANSWERING, ASKING, CALLING, Weather, is_sunny, one_call, weather

TARGET = target()
PROVIDER = OpenAIProvider(base_url=f"{TARGET.url}/v1", api_key=TARGET.api_key)
CHAT = OpenAIChatModel(TARGET.model, provider=PROVIDER)
RESPONSES = OpenAIResponsesModel(TARGET.model, provider=PROVIDER)
SETTINGS: Any = {"temperature": 0, "max_tokens": 48}


def agent(model: Any = CHAT, **options: Any) -> Any:
    return Agent(model, model_settings=SETTINGS, retries=0, **options)


def check_chat() -> None:
    result = agent().run_sync(CAPITAL)

    equal(result.output, ANSWER)
    equal(result.usage.output_tokens, 8)


def check_chat_streamed() -> None:
    async def ask() -> list[str]:
        async with agent().run_stream(CAPITAL) as result:
            return [piece async for piece in result.stream_text(delta=True, debounce_by=None)]

    pieces = asyncio.run(ask())

    equal("".join(pieces), ANSWER)
    assert len(pieces) > 1


def check_conversation() -> None:
    first = agent().run_sync(CAPITAL)
    second = agent().run_sync("And of Italy?", message_history=first.all_messages())

    equal(len(second.all_messages()), 4)
    assert second.output


def check_agent_calls_a_tool() -> None:
    with one_call():
        result = agent(tools=[weather]).run_sync(CALLING)
    is_sunny(result.output)


def check_agent_calls_a_tool_by_responses() -> None:
    with one_call():
        result = agent(RESPONSES, tools=[weather]).run_sync(CALLING)
    is_sunny(result.output)


def check_output_by_a_tool() -> None:
    assert isinstance(agent(output_type=Weather).run_sync(ASKING).output, Weather)


def check_output_by_json_schema() -> None:
    for model in (CHAT, RESPONSES):
        result = agent(model, output_type=NativeOutput(Weather)).run_sync(ASKING)
        assert isinstance(result.output, Weather)


def check_agent_with_a_tool_answers_by_json_schema() -> None:
    result = agent(tools=[weather], output_type=NativeOutput(Weather)).run_sync(ANSWERING)

    assert isinstance(result.output, Weather)


def check_agent_with_a_json_schema_calls_a_tool() -> None:
    with one_call(), suppress(UsageLimitExceeded):
        agent(tools=[weather], output_type=NativeOutput(Weather)).run_sync(
            CALLING, usage_limits=UsageLimits(request_limit=1)
        )


if __name__ == "__main__":
    run(globals())
