"""smolagents' class for servers with OpenAI's API, and its agents."""

import json
from typing import Any

from smolagents import (  # type: ignore[import-not-found]
    ChatMessage,
    MessageRole,
    OpenAIModel,
    ToolCallingAgent,
    tool,
)

from tests.clients.checks import ANSWER, CAPITAL, WEATHER, equal, is_weather, run, target
from tests.clients.weather import ASKING, CALLING, one_call, weather

TARGET = target()
MODEL = OpenAIModel(
    TARGET.model,
    api_base=f"{TARGET.url}/v1",
    api_key=TARGET.api_key,
    client_kwargs={"max_retries": 0},
    temperature=0,
    max_tokens=48,
)


def said(question: str) -> list[Any]:
    return [ChatMessage(MessageRole.USER, [{"type": "text", "text": question}])]


def check_chat() -> None:
    message = MODEL.generate(said(CAPITAL))

    equal((message.content, message.token_usage.output_tokens), (ANSWER, 8))


def check_chat_streamed() -> None:
    deltas = list(MODEL.generate_stream(said(CAPITAL)))

    equal("".join(delta.content or "" for delta in deltas), ANSWER)
    assert len(deltas) > 1


def check_tool_call_is_required() -> None:
    """As its agents do, unless they are told otherwise."""
    call, *_ = MODEL.generate(said(CALLING), tools_to_call_from=[tool(weather)]).tool_calls

    equal(call.function.name, "weather")
    is_weather(json.loads(call.function.arguments))


def check_structured_output() -> None:
    schema = {"name": "weather", "schema": WEATHER, "strict": True}
    message = MODEL.generate(
        said(ASKING), response_format={"type": "json_schema", "json_schema": schema}
    )

    is_weather(json.loads(message.content))


def check_agent_calls_a_tool() -> None:
    agent = ToolCallingAgent(tools=[tool(weather)], model=MODEL, max_steps=1, verbosity_level=0)
    with one_call():
        list(agent.run(CALLING, stream=True))


if __name__ == "__main__":
    run(globals())
