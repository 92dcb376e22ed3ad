"""The official Python client, for what `tests/system/smollm2/test_openai_client.py` leaves out."""

import asyncio
import hashlib
import json
import time
from functools import partial
from typing import Any, Literal

import openai
from pydantic import BaseModel

from tests.clients.checks import (
    ANSWER,
    CAPITAL,
    LONG_STORY,
    WEATHER,
    batch_lines,
    equal,
    is_weather,
    raised,
    run,
    target,
)

TARGET = target()
BASE = f"{TARGET.url}/v1"
CLIENT = openai.OpenAI(base_url=BASE, api_key=TARGET.api_key, max_retries=0)
MESSAGES: Any = [{"role": "user", "content": CAPITAL}]
ASKING: Any = [{"role": "user", "content": "The weather in Rome?"}]
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
RESPONSE_TOOLS: Any = [
    {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}
]


class Weather(BaseModel):
    """The arguments of the weather tool."""

    city: Literal["Paris", "Rome"]
    unit: Literal["C", "F"]


def check_chat_streamed_by_the_helper() -> None:
    with CLIENT.chat.completions.stream(
        model=TARGET.model, messages=MESSAGES, temperature=0
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()

    equal(final.choices[0].message.content, ANSWER)
    assert {"chunk", "content.delta", "content.done"} <= kinds, kinds


def check_chat_of_many_asynchronously() -> None:
    async def ask() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=BASE, api_key=TARGET.api_key) as client:
            create = client.chat.completions.create
            asked = [create(model=TARGET.model, messages=MESSAGES, temperature=0) for _ in range(8)]
            answers = await asyncio.gather(*asked)
            return [answer.choices[0].message.content for answer in answers]

    equal(asyncio.run(ask()), [ANSWER] * 8)


def check_parsed_answer() -> None:
    answer = CLIENT.chat.completions.parse(
        model=TARGET.model, messages=ASKING, response_format=Weather, temperature=0
    )

    assert isinstance(answer.choices[0].message.parsed, Weather)


def check_tool_calls_required() -> None:
    answer = CLIENT.chat.completions.create(
        model=TARGET.model, messages=ASKING, tools=TOOLS, tool_choice="required", temperature=0,
        parallel_tool_calls=False,
    ).choices[0]  # fmt: skip

    equal(answer.finish_reason, "tool_calls")
    calls: Any = answer.message.tool_calls
    assert calls
    for call in calls:
        is_weather(json.loads(call.function.arguments))


def check_tool_calls_streamed_by_the_helper() -> None:
    with CLIENT.chat.completions.stream(
        model=TARGET.model, messages=ASKING, tools=TOOLS, tool_choice=NAMED, temperature=0
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0].message

    calls: Any = final.tool_calls
    assert "tool_calls.function.arguments.delta" in {event.type for event in events}
    is_weather(json.loads(calls[0].function.arguments))


def check_response_streamed() -> None:
    events = list(
        CLIENT.responses.create(model=TARGET.model, input=CAPITAL, temperature=0, stream=True)
    )

    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    equal(text, ANSWER)
    equal([event.sequence_number for event in events], list(range(len(events))))
    equal((events[0].type, events[-1].type), ("response.created", "response.completed"))


def check_response_calls_a_tool() -> None:
    response = CLIENT.responses.create(
        model=TARGET.model, input="The weather in Rome?", tools=RESPONSE_TOOLS,
        tool_choice="required", temperature=0, parallel_tool_calls=False,
    )  # fmt: skip

    calls = [item for item in response.output if item.type == "function_call"]
    assert calls, response.output
    is_weather(json.loads(calls[0].arguments))


def check_response_parsed() -> None:
    response = CLIENT.responses.parse(
        model=TARGET.model, input="The weather in Rome?", text_format=Weather, temperature=0
    )

    assert isinstance(response.output_parsed, Weather)


def check_response_in_the_background() -> None:
    created = CLIENT.responses.create(
        model=TARGET.model, input=CAPITAL, background=True, store=True, temperature=0
    )
    events = list(CLIENT.responses.retrieve(created.id, stream=True, starting_after=1))
    kept = CLIENT.responses.retrieve(created.id)

    equal(events[0].sequence_number, 2)
    equal(events[-1].type, "response.completed")
    equal((kept.status, kept.output_text), ("completed", ANSWER))


def check_response_cancelled() -> None:
    created = CLIENT.responses.create(
        model=TARGET.model, input="Tell me a long story.", background=True, store=True,
        max_output_tokens=2000, extra_body={"ignore_eos": True},
    )  # fmt: skip

    equal(CLIENT.responses.cancel(created.id).status, "cancelled")


def check_stored_response_is_continued() -> None:
    first = CLIENT.responses.create(model=TARGET.model, input=CAPITAL, temperature=0)
    second = CLIENT.responses.create(
        model=TARGET.model, input="And of Italy?", temperature=0, max_output_tokens=8,
        previous_response_id=first.id,
    )  # fmt: skip
    alone = CLIENT.responses.create(
        model=TARGET.model, temperature=0, max_output_tokens=8, store=False,
        input=[
            {"role": "user", "content": CAPITAL},
            {"role": "assistant", "content": ANSWER},
            {"role": "user", "content": "And of Italy?"},
        ],
    )  # fmt: skip

    equal(second.previous_response_id, first.id)
    equal(second.output_text, alone.output_text)
    tokens = [answer.usage and answer.usage.input_tokens for answer in (second, alone)]
    equal(tokens[0], tokens[1])
    items: list[Any] = list(CLIENT.responses.input_items.list(second.id, order="asc", limit=2))
    equal([item.content[0].text for item in items], [CAPITAL, ANSWER, "And of Italy?"])
    for response in (second, first):
        CLIENT.responses.delete(response.id)
        raised(openai.NotFoundError, partial(CLIENT.responses.retrieve, response.id))


def check_conversation() -> None:
    conversation = CLIENT.conversations.create(metadata={"topic": "capitals"})
    CLIENT.responses.create(
        model=TARGET.model, input=CAPITAL, temperature=0, conversation=conversation.id
    )
    CLIENT.conversations.items.create(
        conversation.id, items=[{"type": "message", "role": "user", "content": "Thanks."}]
    )
    items: list[Any] = list(CLIENT.conversations.items.list(conversation.id, order="asc", limit=2))

    equal([item.content[0].text for item in items], [CAPITAL, ANSWER, "Thanks."])
    equal(CLIENT.conversations.retrieve(conversation.id).metadata, {"topic": "capitals"})
    CLIENT.conversations.items.delete(items[-1].id, conversation_id=conversation.id)
    equal(len(list(CLIENT.conversations.items.list(conversation.id))), 2)
    CLIENT.conversations.delete(conversation.id)
    raised(openai.NotFoundError, partial(CLIENT.conversations.retrieve, conversation.id))


def check_embeddings_or_a_clear_refusal() -> None:
    embedder = f"{TARGET.model}-embedder"
    served = {model.id for model in CLIENT.models.list()}
    if embedder not in served:
        try:
            CLIENT.embeddings.create(model=TARGET.model, input="Paris")
        except openai.BadRequestError as error:
            equal("no embeddings" in error.message, True)
            return
        raise AssertionError("embeddings of a model that has none")
    coded = CLIENT.embeddings.create(model=embedder, input=["Paris", "Rome"]).data
    plain = CLIENT.embeddings.create(model=embedder, input="Rome", encoding_format="float").data
    equal([len(one.embedding) for one in coded], [576, 576])
    gap = max(abs(a - b) for a, b in zip(coded[1].embedding, plain[0].embedding, strict=True))
    assert gap < 1e-4, gap


def check_headers_and_errors() -> None:
    raw = CLIENT.chat.completions.with_raw_response.create(
        model=TARGET.model, messages=MESSAGES, max_tokens=1
    )
    answer: Any = raw.parse()
    equal(answer._request_id, raw.headers["x-request-id"])
    wrong = CLIENT.with_options(api_key="wrong")
    for client, model, error in (
        (wrong, TARGET.model, openai.AuthenticationError),
        (CLIENT, "gpt-5", openai.NotFoundError),
    ):
        create = client.chat.completions.create
        raised(error, partial(create, model=model, messages=MESSAGES))


def check_a_tool_beside_a_format() -> None:
    """What agents send whose answers have a type."""
    answer = CLIENT.chat.completions.create(
        model=TARGET.model,
        messages=MESSAGES,
        temperature=0,
        max_tokens=128,
        tools=TOOLS,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "weather", "schema": WEATHER},
        },
    )

    (choice,) = answer.choices
    calls: list[Any] = list(choice.message.tool_calls or ())
    for text in [call.function.arguments for call in calls] or [choice.message.content or ""]:
        is_weather(json.loads(text))


def check_tools_that_are_no_functions_are_named() -> None:
    raw = CLIENT.responses.with_raw_response.create(
        model=TARGET.model, input=CAPITAL, temperature=0, tools=[{"type": "web_search"}]
    )

    equal(raw.headers["x-warren-ignored-tools"], "web_search")
    equal(raw.parse().output_text, ANSWER)


def check_a_base_url_without_a_version() -> None:
    client = CLIENT.with_options(base_url=TARGET.url)
    answer = client.chat.completions.create(model=TARGET.model, messages=MESSAGES, temperature=0)

    equal(answer.choices[0].message.content, ANSWER)


def check_batch_of_a_file_that_was_uploaded_in_parts() -> None:
    content = batch_lines(TARGET.model, CAPITAL)
    upload = CLIENT.uploads.upload_file_chunked(
        file=content, filename="in.jsonl", bytes=len(content), mime_type="application/jsonl",
        purpose="batch", part_size=100, md5=hashlib.md5(content, usedforsecurity=False).hexdigest(),
    )  # fmt: skip
    assert upload.file is not None
    batch = CLIENT.batches.create(
        input_file_id=upload.file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    while batch.status in ("validating", "in_progress", "finalizing"):
        time.sleep(0.2)
        batch = CLIENT.batches.retrieve(batch.id)

    assert batch.output_file_id is not None, batch
    answers = [json.loads(line) for line in CLIENT.files.content(batch.output_file_id).iter_lines()]
    equal([answer["custom_id"] for answer in answers], ["1", "2"])
    for answer in answers:
        equal(answer["response"]["body"]["choices"][0]["message"]["content"], ANSWER)


def check_batch_cancelled() -> None:
    content = batch_lines(TARGET.model, LONG_STORY, max_tokens=2000, ignore_eos=True)
    file = CLIENT.files.create(file=("in.jsonl", content), purpose="batch")
    batch = CLIENT.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    CLIENT.batches.cancel(batch.id)
    while batch.status != "cancelled":
        time.sleep(0.2)
        batch = CLIENT.batches.retrieve(batch.id)

    assert CLIENT.files.delete(file.id).deleted


if __name__ == "__main__":
    run(globals())
