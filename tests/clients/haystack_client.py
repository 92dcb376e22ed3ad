"""Haystack's generators for chat completions and responses, and its agent."""

from typing import Any

from haystack.components.agents import Agent  # type: ignore[import-not-found]
from haystack.components.generators.chat import (  # type: ignore[import-not-found]
    OpenAIChatGenerator,
    OpenAIResponsesChatGenerator,
)
from haystack.dataclasses import ChatMessage  # type: ignore[import-not-found]
from haystack.tools import create_tool_from_function  # type: ignore[import-not-found]
from haystack.utils import Secret  # type: ignore[import-not-found]

from tests.clients.checks import ANSWER, CAPITAL, equal, run, target
from tests.clients.weather import ASKING, CALLING, Weather, is_sunny, one_call, weather

TARGET = target()
COMMON: dict[str, Any] = {
    "model": TARGET.model,
    "api_base_url": f"{TARGET.url}/v1",
    "api_key": Secret.from_token(TARGET.api_key),
    "max_retries": 0,
    "timeout": 600.0,
}
TOOL = create_tool_from_function(weather)


def chat(**options: Any) -> Any:
    options = {"temperature": 0, "max_completion_tokens": 48} | options
    return OpenAIChatGenerator(**COMMON, generation_kwargs=options)


def responses(**options: Any) -> Any:
    options = {"temperature": 0, "max_output_tokens": 48} | options
    return OpenAIResponsesChatGenerator(**COMMON, generation_kwargs=options)


def asked(generator: Any, question: str, **options: Any) -> Any:
    return generator.run([ChatMessage.from_user(question)], **options)["replies"][0]


def check_chat() -> None:
    reply = asked(chat(), CAPITAL)

    equal((reply.text, reply.meta["finish_reason"]), (ANSWER, "stop"))


def check_response() -> None:
    equal(asked(responses(), CAPITAL).text, ANSWER)


def check_streamed() -> None:
    for generator in (chat(), responses()):
        pieces: list[str] = []
        asked(
            generator, CAPITAL, streaming_callback=lambda chunk, to=pieces: to.append(chunk.content)
        )
        equal("".join(pieces), ANSWER)


def check_agent_calls_a_tool() -> None:
    for generator in (chat(), responses()):
        agent = Agent(chat_generator=generator, tools=[TOOL], max_agent_steps=2)
        with one_call():
            result = agent.run(messages=[ChatMessage.from_user(CALLING)])
        is_sunny(result["last_message"].text)


def check_structured_output() -> None:
    Weather.model_validate_json(asked(chat(response_format=Weather), ASKING).text)


def check_structured_output_by_responses() -> None:
    Weather.model_validate_json(asked(responses(text_format=Weather), ASKING).text)


if __name__ == "__main__":
    run(globals())
