"""The official client, unmodified, against each way to deploy Warren."""

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

MODEL = "smollm2"
CAPITAL: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the capital of France?"}
]


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
    assert len([content for content in contents if content]) > 3
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


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


def test_32_streams_at_once_are_each_what_they_are_alone(client: openai.OpenAI) -> None:
    prompts = [f"{k}. The most important thing about the number {k} is" for k in range(32)]
    alone = [streamed(client, prompt) for prompt in prompts]

    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lambda prompt: streamed(client, prompt), prompts))

    assert together == alone
