"""Where prompts are tokenized."""

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from msgspec import structs

from bench.echo_worker import echo_model
from shared.errors import ContextLengthExceeded, InvalidRequest
from shared.messages import (
    ChatMessage,
    ChatPrompt,
    GenerationJob,
    Prompt,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
    ToolCall,
)
from shared.settings import WorkerSettings
from worker.decode.choices import plan, prompt_texts
from worker.decode.served_model import ServedModel
from worker.text import TextThreads, Tokenizer
from worker.text.chat_template import ChatTemplate

_Result = TypeVar("_Result")

LONG = "word " * 1000
CALL = ToolCall(id="call", name="look_up", arguments=f'{{"text": "{LONG}"}}')


class CountedThreads(TextThreads):
    num_works = 0

    async def run(
        self, tenant: str, work: Callable[[], _Result], *, max_wait_s: float | None = None
    ) -> _Result:
        self.num_works += 1
        return await super().run(tenant, work, max_wait_s=max_wait_s)


@pytest.fixture
def model() -> ServedModel:
    return replace(echo_model(WorkerSettings(model="echo")), texts=CountedThreads())


def job(prompt: Prompt, **sampling: Any) -> GenerationJob:
    return GenerationJob(
        request_id="r", model="echo", prompts=(prompt,), sampling=SamplingParams(**sampling)
    )


def chat(message: ChatMessage) -> ChatPrompt:
    return ChatPrompt(messages=(message,))


@pytest.mark.parametrize(
    ("prompt", "num_works"),
    [
        (TextPrompt(text="short"), 0),
        (TextPrompt(text=LONG), 1),
        (chat(ChatMessage(role="user", content=LONG)), 1),
        (chat(ChatMessage(role="assistant", content="", tool_calls=(CALL,))), 1),
        (chat(ChatMessage(role="assistant", content="", reasoning_content=LONG)), 1),
    ],
    ids=["a short text", "a long text", "a long chat", "long arguments", "long reasoning"],
)
async def test_long_prompts_are_tokenized_beside_the_event_loop(
    prompt: Prompt, num_works: int, model: ServedModel
) -> None:
    await plan(job(prompt), model)

    assert model.texts.num_works == num_works  # type: ignore[attr-defined]


@pytest.mark.parametrize(("num_tokens", "num_works"), [(10, 0), (2_500, 1)])
async def test_long_texts_of_prompts_are_decoded_beside_the_event_loop(
    num_tokens: int, num_works: int, model: ServedModel
) -> None:
    asked = structs.replace(job(TokenPrompt(token_ids=(65,) * num_tokens)), wants_prompt_text=True)
    plans = await plan(asked, model)
    num_before = model.texts.num_works  # type: ignore[attr-defined]

    (text,) = await prompt_texts(asked, plans, model)

    assert text == model.tokenizer.decode((65,) * num_tokens)
    assert model.texts.num_works - num_before == num_works  # type: ignore[attr-defined]


@pytest.mark.parametrize(("num_words", "num_works"), [(10, 0), (1_000, 1)])
async def test_what_a_template_prints_decides_where_it_is_tokenized(
    num_words: int, num_works: int, model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = f"{{% for _ in range({num_words}) %}}word {{% endfor %}}"
    monkeypatch.setattr(model.tokenizer, "template", ChatTemplate(source, {}))

    await plan(job(chat(ChatMessage(role="user", content="short"))), model)

    assert model.texts.num_works == num_works  # type: ignore[attr-defined]


@pytest.mark.parametrize(("now", "year"), [(0.0, "2001"), (5e9, "2128")])
async def test_every_run_of_a_job_prints_the_same_date(
    now: float, year: str, model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = ChatTemplate("{{ strftime_now('%Y') }}", {})
    monkeypatch.setattr(model.tokenizer, "template", template)
    prompt = structs.replace(chat(ChatMessage(role="user", content="?")), now=now)

    (planned,) = await plan(structs.replace(job(prompt), created_at=1e9), model)

    assert model.tokenizer.decode(planned.prompt_ids) == year


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(model: ServedModel) -> None:
    text = "x" * (model.max_seq_len * model.tokenizer.max_entry_bytes + 1)

    with pytest.raises(ContextLengthExceeded, match="longer than"):
        await plan(job(TextPrompt(text=text)), model)


@pytest.mark.parametrize(
    ("sampling", "max_tokens"),
    [({}, 10), ({"max_tokens": 5}, 5), ({"max_tokens": 1 << 20, "clamp_max_tokens": True}, 10)],
    ids=["no limit", "a limit", "a limit beyond the context"],
)
async def test_an_answer_ends_at_its_limit_or_with_the_context(
    sampling: dict[str, Any], max_tokens: int, model: ServedModel
) -> None:
    prompt = TokenPrompt(token_ids=(1,) * (model.max_seq_len - 10))

    (planned,) = await plan(job(prompt, **sampling), model)

    assert planned.max_tokens == max_tokens


@pytest.mark.parametrize(
    ("room", "sampling"),
    [(10, {"max_tokens": 11}), (0, {}), (0, {"max_tokens": 9, "clamp_max_tokens": True})],
)
async def test_an_answer_that_has_no_room_is_refused(
    room: int, sampling: dict[str, Any], model: ServedModel
) -> None:
    prompt = TokenPrompt(token_ids=(1,) * (model.max_seq_len - room))

    with pytest.raises(ContextLengthExceeded, match="maximum context length"):
        await plan(job(prompt, **sampling), model)


async def test_a_bad_word_that_the_model_never_generates_is_left_out(tokenizer: Tokenizer) -> None:
    smaller = copy(tokenizer)
    last = tokenizer.vocab_size - 1
    smaller.vocab_size = last
    model = replace(echo_model(WorkerSettings(model="echo")), tokenizer=smaller)
    words = (smaller.decode([last]), "no")

    (planned,) = await plan(job(TextPrompt(text="a"), bad_words=words), model)

    bad = planned.vocabulary.bad_words
    assert bad
    assert max(max(word) for word in bad) < last


def limited(
    num_tokens: int, num_prompt: int, num_choices: int = 1, **sampling: Any
) -> GenerationJob:
    prompt = TokenPrompt(token_ids=(1,) * num_prompt)
    return structs.replace(
        job(prompt, **sampling), max_total_tokens=num_tokens, num_choices=num_choices
    )


@pytest.mark.parametrize(
    ("wanted", "num_tokens"),
    [
        (limited(100, 90, max_tokens=11), "101 tokens \\(90 in the prompt, 11 in"),
        (limited(100, 90, num_choices=2, max_tokens=6), "102 tokens"),
        (limited(100, 100), "101 tokens"),
        (limited(100, 99, num_choices=2, max_tokens=6, clamp_max_tokens=True), "101 tokens"),
    ],
    ids=["answer", "choices", "prompt", "clamped"],
)
async def test_more_tokens_than_the_api_key_has_for_a_minute_are_refused(
    wanted: GenerationJob, num_tokens: str, model: ServedModel
) -> None:
    with pytest.raises(InvalidRequest, match=num_tokens) as raised:
        await plan(wanted, model)

    assert raised.value.param == "max_tokens"


@pytest.mark.parametrize(
    ("wanted", "max_tokens"),
    [
        (limited(100, 90, max_tokens=10), 10),
        (limited(100, 90), 10),
        (limited(100, 90, num_choices=3), 3),
        (limited(100, 90, max_tokens=50, clamp_max_tokens=True), 10),
    ],
    ids=["answer", "no max_tokens", "choices", "clamped"],
)
async def test_an_answer_without_max_tokens_ends_with_the_tokens_of_the_minute(
    wanted: GenerationJob, max_tokens: int, model: ServedModel
) -> None:
    (planned,) = await plan(wanted, model)

    assert planned.max_tokens == max_tokens
