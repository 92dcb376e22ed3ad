"""LangChain's classes for OpenAI."""

import asyncio
import json
from typing import Any, Literal

import openai
from langchain_core.messages import (  # type: ignore[import-not-found]
    AIMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings  # type: ignore[import-not-found]
from pydantic import BaseModel

from tests.clients.checks import ANSWER, CAPITAL, WEATHER, equal, is_weather, run, target

TARGET = target()
COMMON: dict[str, Any] = {
    "model": TARGET.model,
    "base_url": f"{TARGET.url}/v1",
    "api_key": TARGET.api_key,
    "max_retries": 0,
}
CHAT = ChatOpenAI(**COMMON, temperature=0, stream_usage=True)
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Tell the weather.", "parameters": WEATHER},
}


class Weather(BaseModel):
    """The arguments of the weather tool."""

    city: Literal["Paris", "Rome"]
    unit: Literal["C", "F"]


def tokens(message: Any) -> tuple[int, int]:
    usage = message.usage_metadata
    return usage["input_tokens"], usage["output_tokens"]


def check_invoke() -> None:
    answer = CHAT.invoke(CAPITAL)

    equal(answer.content, ANSWER)
    equal(answer.response_metadata["finish_reason"], "stop")
    equal(tokens(answer), (37, 8))


def check_stream_with_usage() -> None:
    chunks = list(CHAT.stream(CAPITAL))
    whole = sum(chunks[1:], chunks[0])

    equal(whole.content, ANSWER)
    equal(tokens(whole), (37, 8))
    assert len([chunk for chunk in chunks if chunk.content]) > 1


def check_conversation_with_system_message() -> None:
    said = [SystemMessage("Be brief."), HumanMessage("Hi"), AIMessage("Hello"), HumanMessage("Bye")]

    assert CHAT.invoke(said, max_tokens=8).content


def check_many_at_once() -> None:
    answers = asyncio.run(CHAT.abatch([CAPITAL] * 4))

    equal([answer.content for answer in answers], [ANSWER] * 4)


def check_logprobs() -> None:
    answer = CHAT.bind(logprobs=True, top_logprobs=2).invoke(CAPITAL)

    tokens = answer.response_metadata["logprobs"]["content"]
    assert "".join(token["token"] for token in tokens).startswith(ANSWER)
    equal({len(token["top_logprobs"]) for token in tokens}, {2})


def check_bind_tools_named() -> None:
    answer = CHAT.bind_tools([TOOL], tool_choice="weather").invoke("The weather in Rome?")

    (call,) = answer.tool_calls
    equal((call["name"], answer.response_metadata["finish_reason"]), ("weather", "tool_calls"))
    is_weather(call["args"])


def check_bind_tools_required_and_strict() -> None:
    bound = CHAT.bind_tools([Weather], tool_choice="required", strict=True, max_tokens=128)
    answer = bound.invoke("The weather in Rome?")

    assert answer.tool_calls, answer
    for call in answer.tool_calls:
        equal(call["name"], "Weather")
        is_weather(call["args"])


def check_streamed_tool_call_is_the_whole_one() -> None:
    bound = CHAT.bind_tools([TOOL], tool_choice="weather")
    chunks = list(bound.stream("The weather in Rome?"))
    streamed = sum(chunks[1:], chunks[0]).tool_calls
    whole = bound.invoke("The weather in Rome?").tool_calls

    equal([call["args"] for call in streamed], [call["args"] for call in whole])
    assert streamed[0]["id"]


def check_tool_result_is_answered() -> None:
    question = HumanMessage("The weather in Rome?")
    call = CHAT.bind_tools([TOOL], tool_choice="weather").invoke([question])
    result = ToolMessage("sunny, 25", tool_call_id=call.tool_calls[0]["id"])

    answer = CHAT.bind_tools([TOOL]).invoke([question, call, result], max_tokens=16)

    assert answer.content or answer.tool_calls


def check_structured_output_by_json_schema() -> None:
    structured = CHAT.with_structured_output(Weather, method="json_schema", strict=True)

    assert isinstance(structured.invoke("Weather in Rome, as JSON."), Weather)


def check_structured_output_by_function_calling() -> None:
    structured = CHAT.with_structured_output(Weather, method="function_calling")

    assert isinstance(structured.invoke("Weather in Rome, as JSON."), Weather)


def check_structured_output_by_json_mode() -> None:
    chat = ChatOpenAI(**COMMON, temperature=0, max_tokens=64)
    structured = chat.with_structured_output(method="json_mode", include_raw=True)

    raw = structured.invoke('Say {"city": "Rome"} as JSON.')["raw"]
    if raw.response_metadata["finish_reason"] == "stop":
        assert isinstance(json.loads(raw.content), dict)


def check_streamed_structured_output() -> None:
    structured = CHAT.with_structured_output(Weather, method="json_schema")

    assert isinstance(list(structured.stream("Weather in Rome, as JSON."))[-1], Weather)


def check_tools_beside_a_schema() -> None:
    """What an agent sends whose answer has a type."""
    chat = ChatOpenAI(**COMMON, temperature=0, max_tokens=128)
    bound = chat.bind_tools([Weather], response_format=Weather, strict=True)
    answer = bound.invoke("The weather in Rome?")

    for arguments in [call["args"] for call in answer.tool_calls] or [json.loads(answer.content)]:
        is_weather(arguments)


def check_responses_api() -> None:
    chat = ChatOpenAI(**COMMON, temperature=0, use_responses_api=True)
    answer = chat.invoke(CAPITAL)
    chunks = list(chat.stream(CAPITAL))

    equal(answer.text, ANSWER)
    equal(sum(chunks[1:], chunks[0]).text, ANSWER)
    equal(tokens(answer), (37, 8))


def check_responses_api_with_tools() -> None:
    chat = ChatOpenAI(**COMMON, temperature=0, use_responses_api=True)
    answer = chat.bind_tools([TOOL], tool_choice="weather").invoke("The weather in Rome?")

    (call,) = answer.tool_calls
    is_weather(call["args"])


def check_completions() -> None:
    model = OpenAI(**COMMON, temperature=0, max_tokens=8)
    prompts = ["Once upon a time", "The capital of Italy is"]
    whole = [generations[0].text for generations in model.generate(prompts).generations]
    streamed = ["".join(model.stream(prompt)) for prompt in prompts]

    equal(whole, streamed)
    assert all(whole)


def check_embeddings_or_a_clear_refusal() -> None:
    served = [model.id for model in CHAT.root_client.models.list()]
    model = next((name for name in served if name.endswith("-embedder")), TARGET.model)
    embeddings = OpenAIEmbeddings(**COMMON | {"model": model}, check_embedding_ctx_length=False)

    try:
        vectors = embeddings.embed_documents(["Paris", "Rome"])
    except openai.BadRequestError as error:
        equal((len(served), "no embeddings" in error.message), (1, True))
    else:
        equal([len(vector) for vector in vectors], [576, 576])


if __name__ == "__main__":
    run(globals())
