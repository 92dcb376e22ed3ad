"""LlamaIndex's class for servers with OpenAI's API."""

import asyncio
from typing import Any

from llama_index.core.agent.workflow import FunctionAgent  # type: ignore[import-not-found]
from llama_index.core.llms import ChatMessage  # type: ignore[import-not-found]
from llama_index.core.tools import FunctionTool  # type: ignore[import-not-found]
from llama_index.llms.openai_like import OpenAILike  # type: ignore[import-not-found]

from tests.clients.checks import ANSWER, CAPITAL, equal, run, target
from tests.clients.weather import ASKING, CALLING, Weather, is_sunny, one_call, weather

TARGET = target()
COMMON: dict[str, Any] = {
    "model": TARGET.model,
    "api_base": f"{TARGET.url}/v1",
    "api_key": TARGET.api_key,
    "is_chat_model": True,
    "is_function_calling_model": True,
    "temperature": 0,
    "max_tokens": 48,
    "max_retries": 0,
    "timeout": 600.0,
}
LLM = OpenAILike(**COMMON)
QUESTION = [ChatMessage(role="user", content=CAPITAL)]


def check_chat() -> None:
    equal(LLM.chat(QUESTION).message.content, ANSWER)


def check_chat_streamed() -> None:
    chunks = list(LLM.stream_chat(QUESTION))

    equal("".join(chunk.delta or "" for chunk in chunks), ANSWER)
    assert len(chunks) > 1


def check_completion() -> None:
    llm = OpenAILike(**COMMON | {"is_chat_model": False, "max_tokens": 8})
    whole = llm.complete("Once upon a time").text
    streamed = "".join(chunk.delta or "" for chunk in llm.stream_complete("Once upon a time"))

    equal(streamed, whole)
    assert whole


def check_agent_calls_a_tool() -> None:
    agent = FunctionAgent(tools=[FunctionTool.from_defaults(weather)], llm=LLM)

    async def ask() -> str:
        return str(await agent.run(CALLING))

    with one_call():
        answer = asyncio.run(ask())
    is_sunny(answer)


def check_structured_output() -> None:
    structured = LLM.as_structured_llm(Weather)

    assert isinstance(structured.complete(ASKING).raw, Weather)


def check_structured_output_by_json_schema() -> None:
    llm = OpenAILike(**COMMON, should_use_structured_outputs=True)

    assert isinstance(llm.as_structured_llm(Weather).complete(ASKING).raw, Weather)


if __name__ == "__main__":
    run(globals())
