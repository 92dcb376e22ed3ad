"""AutoGen's client for servers with OpenAI's API, and its assistant."""

import asyncio
from typing import Any

from autogen_agentchat.agents import AssistantAgent  # type: ignore[import-not-found]
from autogen_core.models import CreateResult, UserMessage  # type: ignore[import-not-found]
from autogen_core.tools import FunctionTool  # type: ignore[import-not-found]
from autogen_ext.models.openai import OpenAIChatCompletionClient  # type: ignore[import-not-found]

from tests.clients.checks import ANSWER, CAPITAL, equal, run, target
from tests.clients.weather import ANSWERING, ASKING, CALLING, Weather, is_sunny, one_call, weather

TARGET = target()
STRICT = FunctionTool(weather, "Tell the weather.", strict=True)
ABLE = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "structured_output": True,
    "family": "unknown",
}


def client() -> Any:
    return OpenAIChatCompletionClient(
        model=TARGET.model,
        base_url=f"{TARGET.url}/v1",
        api_key=TARGET.api_key,
        model_info=ABLE,
        max_retries=0,
        temperature=0,
        max_tokens=48,
    )


def said(question: str) -> list[Any]:
    return [UserMessage(content=question, source="user")]


def answered(question: str, **options: Any) -> Any:
    """The content of an assistant's last message."""

    async def ask() -> Any:
        agent = AssistantAgent("assistant", client(), system_message=None, **options)
        return (await agent.run(task=question)).messages[-1].content

    return asyncio.run(ask())


def check_chat() -> None:
    result = asyncio.run(client().create(said(CAPITAL)))

    equal((result.content, result.finish_reason), (ANSWER, "stop"))
    equal(result.usage.completion_tokens, 8)


def check_chat_streamed() -> None:
    async def ask() -> list[Any]:
        stream = client().create_stream(said(CAPITAL), include_usage=True)
        return [piece async for piece in stream]

    *pieces, result = asyncio.run(ask())

    equal("".join(pieces), ANSWER)
    assert isinstance(result, CreateResult)
    equal((result.content, result.usage.completion_tokens), (ANSWER, 8))


def check_agent_calls_a_tool() -> None:
    for stream in (False, True):
        with one_call():
            answer = answered(
                CALLING, tools=[weather], reflect_on_tool_use=True, model_client_stream=stream
            )
        is_sunny(answer)


def check_structured_output() -> None:
    assert isinstance(answered(ASKING, output_content_type=Weather), Weather)


def check_agent_with_a_tool_answers_by_schema() -> None:
    assert isinstance(answered(ANSWERING, tools=[STRICT], output_content_type=Weather), Weather)


def check_agent_with_a_schema_calls_a_tool() -> None:
    with one_call():
        answered(CALLING, tools=[STRICT], output_content_type=Weather, reflect_on_tool_use=False)


if __name__ == "__main__":
    run(globals())
