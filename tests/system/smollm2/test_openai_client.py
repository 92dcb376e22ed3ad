"""The official client, unmodified, against each kind of deployment."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

MODEL = "smollm2"
CAPITAL: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the capital of France?"}
]

over_rabbitmq = pytest.mark.parametrize(
    "deployment", [pytest.param("gateway", marks=pytest.mark.rabbit)], indirect=True
)
"""For what does not depend on the kind of the deployment."""


def streamed(client: openai.OpenAI, prompt: str, *, max_tokens: int = 10) -> str:
    chunks = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=max_tokens, temperature=0, stream=True
    )
    return "".join(chunk.choices[0].text for chunk in chunks)


def test_a_chat_is_answered(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=CAPITAL, temperature=0)

    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"


def test_a_chat_is_streamed(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(model=MODEL, messages=CAPITAL, temperature=0, stream=True)
    )

    contents = [chunk.choices[0].delta.content or "" for chunk in chunks]
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert "".join(contents) == "The capital of France is Paris."
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


def test_an_answer_comes_in_pieces(client: openai.OpenAI) -> None:
    """A busy machine coalesces chunks, but never all chunks of an answer."""
    chunks = client.completions.create(
        model=MODEL, prompt="Once upon a time", max_tokens=48, temperature=0, stream=True
    )

    assert len([chunk for chunk in chunks if chunk.choices[0].text]) > 3


def test_usage_is_the_same_streamed_and_not(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=CAPITAL, temperature=0)
    *_, last = client.chat.completions.create(
        model=MODEL,
        messages=CAPITAL,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )

    assert answer.usage is not None
    assert last.usage == answer.usage
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (37, 8)


def test_a_completion_stops_at_its_limit(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="Once upon a time", max_tokens=5, temperature=0
    )

    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5


def test_a_stop_string_ends_the_text_and_is_not_in_it(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=CAPITAL, temperature=0, stop=[" France"]
    )

    assert answer.choices[0].message.content == "The capital of"
    assert answer.choices[0].finish_reason == "stop"


def test_several_prompts_are_several_choices(client: openai.OpenAI) -> None:
    prompts = ["Once upon a time", "The capital of Italy is"]

    answer = client.completions.create(model=MODEL, prompt=prompts, max_tokens=6, temperature=0)

    assert [choice.index for choice in answer.choices] == [0, 1]
    assert [choice.text for choice in answer.choices] == [
        streamed(client, prompt, max_tokens=6) for prompt in prompts
    ]


@over_rabbitmq
def test_the_same_seed_draws_the_same_answer(client: openai.OpenAI) -> None:
    first, again, other = (
        client.completions.create(
            model=MODEL, prompt="A short poem:", max_tokens=16, temperature=1.0, seed=seed
        )
        .choices[0]
        .text
        for seed in (7, 7, 8)
    )

    assert first == again != other


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-5", messages=CAPITAL)

    assert caught.value.code == "model_not_found"


def test_a_prompt_beyond_the_context_is_a_bad_request(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="word " * 10_000, stream=True)

    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


def test_a_bad_parameter_is_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=CAPITAL, temperature=3)

    assert caught.value.param == "temperature"


@pytest.fixture(scope="module")
def said_alone() -> dict[str, str]:
    """The answer of a deployment to each prompt, which all other deployments must give, too."""
    return {}


def test_32_streams_at_once_are_each_what_they_are_alone(
    client: openai.OpenAI, said_alone: dict[str, str]
) -> None:
    prompts = [f"The number {k} again: {k}, {k}, {k}," for k in range(10, 42)]
    if not said_alone:
        said_alone |= {prompt: streamed(client, prompt, max_tokens=3) for prompt in prompts}

    with ThreadPoolExecutor(len(prompts)) as pool:
        together = pool.map(lambda prompt: streamed(client, prompt, max_tokens=3), prompts)

    assert dict(zip(prompts, together, strict=True)) == said_alone
    assert len(set(said_alone.values())) == len(prompts)


@over_rabbitmq
def test_several_answers_are_drawn_apart_and_again_the_same(client: openai.OpenAI) -> None:
    first, again = (
        client.completions.create(
            model=MODEL, prompt="A short poem:", n=3, max_tokens=8, temperature=1.0, seed=7
        )
        for _ in range(2)
    )

    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len({choice.text for choice in first.choices}) == 3
    assert [choice.text for choice in first.choices] == [choice.text for choice in again.choices]


@over_rabbitmq
def test_logprobs_are_the_same_streamed_and_whole(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {
        "model": MODEL,
        "messages": CAPITAL,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 3,
    }

    whole = client.chat.completions.create(**request).choices[0].logprobs
    streamed = [
        token
        for chunk in client.chat.completions.create(**request, stream=True)
        for choice in chunk.choices
        if choice.logprobs
        for token in choice.logprobs.content
    ]

    assert whole is not None
    assert whole.content == streamed
    for token in whole.content or []:
        assert token.token == token.top_logprobs[0].token
        assert token.logprob == token.top_logprobs[0].logprob <= 0
    text = b"".join(bytes(token.bytes or []) for token in whole.content or [])
    assert text.decode().startswith("The capital of France is Paris.")


@over_rabbitmq
def test_a_prompt_is_scored_as_it_was_generated(client: openai.OpenAI) -> None:
    prompt = "Once upon a time, there was"
    said = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=6, temperature=0, logprobs=1
    ).choices[0]
    scored = client.completions.create(
        model=MODEL, prompt=prompt + said.text, max_tokens=0, echo=True, logprobs=1
    ).choices[0]

    assert said.logprobs is not None
    assert scored.logprobs is not None
    assert scored.text == prompt + said.text
    # The client's types do not include null.
    first, *others = scored.logprobs.model_dump()["token_logprobs"]
    assert first is None
    assert others[-6:] == pytest.approx(said.logprobs.token_logprobs, abs=0.05)


@over_rabbitmq
def test_an_answer_matches_its_schema(client: openai.OpenAI) -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "is_capital": {"type": "boolean"}},
        "required": ["city", "is_capital"],
    }

    answer = client.chat.completions.create(
        model=MODEL,
        messages=CAPITAL,
        temperature=1,
        seed=3,
        max_tokens=64,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "city", "schema": schema, "strict": True},
        },
    )

    said = json.loads(answer.choices[0].message.content or "")
    jsonschema.validate(said, schema)
    assert set(said) == {"city", "is_capital"}
    assert answer.choices[0].finish_reason == "stop"


def test_a_model_without_a_template_for_tools_is_made_to_call(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What time is it?"}],
        temperature=0,
        tools=[{"type": "function", "function": {"name": "get_time"}}],
        tool_choice={"type": "function", "function": {"name": "get_time"}},
        response_format={"type": "json_object"},
    )

    assert answer.choices[0].finish_reason == "tool_calls"
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    (call,) = calls
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("get_time", "{}")


def test_a_response_is_the_chats_answer(client: openai.OpenAI) -> None:
    question = str(CAPITAL[0]["content"])

    whole = client.responses.create(model=MODEL, input=question, temperature=0)
    with client.responses.stream(model=MODEL, input=question, temperature=0) as stream:
        streamed = stream.get_final_response()

    assert whole.output_text == streamed.output_text == "The capital of France is Paris."


def test_tokens_go_there_and_back(client: openai.OpenAI) -> None:
    url, text = str(client.base_url).removesuffix("/v1/"), "Once upon a time é"
    headers = {"authorization": f"Bearer {client.api_key}"}

    tokens = httpx.post(
        f"{url}/tokenize", json={"model": MODEL, "prompt": text}, headers=headers, timeout=60
    ).json()
    back = httpx.post(
        f"{url}/detokenize",
        json={"model": MODEL, "tokens": tokens["tokens"]},
        headers=headers,
        timeout=60,
    ).json()

    assert tokens["count"] == len(tokens["tokens"]) > 4
    assert back == {"prompt": text}
