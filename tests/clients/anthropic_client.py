"""The official Python client of Anthropic."""

from typing import Any

import anthropic
from pydantic import BaseModel

from tests.clients.checks import ANSWER, CAPITAL, WEATHER, equal, is_weather, run, target

TARGET = target()
CLIENT = anthropic.Anthropic(base_url=TARGET.url, api_key=TARGET.api_key, max_retries=0)
ASK: Any = {
    "model": TARGET.model,
    "max_tokens": 32,
    "messages": [{"role": "user", "content": CAPITAL}],
    "extra_body": {"temperature": 0},
}
WITH_TOOL: Any = {
    **ASK,
    "max_tokens": 128,
    "messages": [{"role": "user", "content": "The weather in Rome?"}],
    "tools": [{"name": "weather", "description": "The weather.", "input_schema": WEATHER}],
    "tool_choice": {"type": "tool", "name": "weather"},
}


class City(BaseModel):
    """A city."""

    city: str


def text_of(message: Any) -> str:
    (block,) = message.content
    return str(block.text)


def check_message() -> None:
    message = CLIENT.messages.create(**ASK)

    equal(text_of(message), ANSWER)
    equal((message.stop_reason, message.usage.output_tokens), ("end_turn", 8))
    equal(message._request_id, message.id)


def check_message_streamed() -> None:
    with CLIENT.messages.stream(**ASK) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()

    equal((text, text_of(message)), (ANSWER, ANSWER))
    equal(message.stop_reason, "end_turn")


def check_beta_with_blocks() -> None:
    block = {"type": "text", "text": CAPITAL, "cache_control": {"type": "ephemeral"}}
    message = CLIENT.beta.messages.create(
        **{**ASK, "messages": [{"role": "user", "content": [block]}]},
        betas=["interleaved-thinking-2025-05-14"],
        metadata={"user_id": "u"},
        thinking={"type": "enabled", "budget_tokens": 1024},
    )

    equal(text_of(message), ANSWER)


def check_stop_sequence() -> None:
    message = CLIENT.messages.create(**ASK, stop_sequences=[" is"])

    equal(text_of(message), "The capital of France")
    equal((message.stop_reason, message.stop_sequence), ("stop_sequence", " is"))


def check_max_tokens() -> None:
    message = CLIENT.messages.create(**{**ASK, "max_tokens": 2})

    equal((message.stop_reason, message.usage.output_tokens), ("max_tokens", 2))


def check_tool_call() -> None:
    message = CLIENT.messages.create(**WITH_TOOL)
    call: Any = message.content[0]

    equal(message.stop_reason, "tool_use")
    is_weather(call.input)


def check_tool_call_streamed_and_answered() -> None:
    with CLIENT.messages.stream(**WITH_TOOL) as stream:
        message = stream.get_final_message()
    call: Any = message.content[0]
    is_weather(call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny, 20 C."}
    more = [
        {"role": "assistant", "content": [block.to_dict() for block in message.content]},
        {"role": "user", "content": [result]},
    ]

    messages = [*WITH_TOOL["messages"], *more]
    answer = CLIENT.messages.create(**{**WITH_TOOL, "messages": messages, "tool_choice": None})
    equal(answer.role, "assistant")


def check_tokens_are_counted() -> None:
    counted = CLIENT.messages.count_tokens(model=TARGET.model, messages=ASK["messages"])
    usage = CLIENT.messages.create(**ASK).usage

    equal(counted.input_tokens, usage.input_tokens + (usage.cache_read_input_tokens or 0))


def check_parsed_answer() -> None:
    message = CLIENT.messages.parse(**ASK, output_format=City)

    assert isinstance(message.parsed_output, City)


def check_errors() -> None:
    wrong = CLIENT.with_options(api_key="wrong")
    for client, change, error in (
        (wrong, {}, anthropic.AuthenticationError),
        (CLIENT, {"model": "claude"}, anthropic.NotFoundError),
        (CLIENT, {"max_tokens": -1}, anthropic.BadRequestError),
        (CLIENT, {"system": "word " * 9000}, anthropic.BadRequestError),
    ):
        try:
            client.messages.create(**{**ASK, **change})
        except error as raised:
            body: Any = raised.body
            equal((body["type"], body["request_id"]), ("error", raised.request_id))
            continue
        raise AssertionError(f"no {error.__name__}")


if __name__ == "__main__":
    run(globals())
