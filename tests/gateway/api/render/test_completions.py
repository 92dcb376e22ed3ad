"""How a completion's log is worded, streamed and whole."""

from typing import Any

import pytest
from msgspec import structs

from gateway.api.render import whole_answer
from gateway.api.render.answer_builder import AnswerBuilder
from gateway.api.render.logprobs import TextScale, joined
from shared.messages import Choice, Completed, TokenLogprobs
from tests.support.gateway.rendering import END, Log, context_of, told_as


def completion(**fields: Any) -> Log:
    prompts = fields.pop("prompts", ())
    rendering = context_of(endpoint="completions", request_id="cmpl-1", **fields)
    return Log(rendering, prompts=prompts)


def streamed_text(log: Log, choice: int = 0) -> str:
    chunks = (chunk["choices"][0] for chunk in log.chunks())
    return "".join(found["text"] for found in chunks if found["index"] == choice)


def streamed_logprobs(log: Log, choice: int = 0) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {}
    for chunk in log.chunks():
        found = chunk["choices"][0]
        if found["index"] == choice and found["logprobs"]:
            for name, values in found["logprobs"].items():
                columns.setdefault(name, []).extend(values)
    return columns


def test_logprobs_are_parallel_lists() -> None:
    """The shape of completions differs from that of chats."""
    log = completion(logprobs=1).say("é", " b").finish("!")

    (choice,) = log.whole()["choices"]

    assert choice["logprobs"] == {
        "tokens": ["é", " b", "!"],
        "token_logprobs": [-2.0, -2.0, -2.0],
        "text_offset": [0, 1, 3],
        "top_logprobs": [{"best": -1.0, token: -2.0} for token in ("é", " b", "!")],
    }
    assert streamed_logprobs(log) == choice["logprobs"]


def test_without_alternatives_the_tokens_have_logprobs() -> None:
    """``logprobs=0`` returns the logprob of each token alone."""
    (choice,) = completion(logprobs=0).finish("a").whole()["choices"]

    assert choice["logprobs"]["token_logprobs"] == [-2.0]


def measured(token: str, num_chars: int) -> TokenLogprobs:
    """A token with the number of characters that it adds to the text."""
    return structs.replace(told_as(token), num_chars=num_chars)


def test_offsets_do_not_count_special_tokens_that_the_text_leaves_out() -> None:
    tokens = measured(" Hi", 2), measured(END, 0), measured("!", 1)

    offsets = TextScale(as_ids=False).read(tokens).text_offset

    assert offsets == [0, 2, 2]


@pytest.mark.parametrize(
    ("text", "first", "num_chars"), [("Hi\n", "", 0), ("<s>Hi</s>\n", "<s>", 4)]
)
def test_an_echo_of_token_ids_has_offsets_of_its_text(
    text: str, first: str, num_chars: int
) -> None:
    scale = TextScale(as_ids=False)
    tokens = [None, measured("Hi", 2), measured("</s>", num_chars), measured("\n", 1)]

    words = joined(scale.echo(text, [1, 2, 3, 4], tokens), scale.read([measured("!", 1)]))

    assert words.tokens == [first, "Hi", "</s>", "\n", "!"]
    start = len(first)
    after = start + 2 + num_chars
    assert words.text_offset == [0, start, start + 2, after, after + 1]


@pytest.mark.parametrize("size", [1, 2, 1024])
def test_an_echo_has_the_prompts_logprobs_the_first_of_them_null(size: int) -> None:
    """Without the logprobs of the prompt, lm-eval's scores are no better than chance."""
    log = completion(logprobs=1, echo=True).score(size).say(" d").finish(".")

    (choice,) = log.whole()["choices"]

    logprobs = choice["logprobs"]
    assert choice["text"] == "a b c d."
    assert logprobs["tokens"] == ["a", " b", " c", " d", "."]
    assert logprobs["token_logprobs"] == [None, -2.0, -2.0, -2.0, -2.0]
    assert logprobs["top_logprobs"][0] is None
    assert [
        choice["text"][offset : offset + len(token)]
        for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True)
    ] == logprobs["tokens"]
    assert streamed_text(log) == choice["text"]
    assert streamed_logprobs(log) == logprobs


def test_a_prompt_is_scored_without_output() -> None:
    """``max_tokens=0`` with ``echo``."""
    log = completion(logprobs=0, echo=True).score().finish("", "length")

    (choice,) = log.whole()["choices"]

    assert choice["text"] == streamed_text(log) == "a b c"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["token_logprobs"][:3] == [None, -2.0, -2.0]


def test_an_echo_has_the_end_token_too() -> None:
    """lm-eval scores a prompt by all logprobs but the last."""
    log = completion(logprobs=0, echo=True).score().finish(END)

    (choice,) = log.whole()["choices"]

    assert choice["text"] == "a b c"
    assert choice["logprobs"]["tokens"] == ["a", " b", " c", END]
    assert streamed_logprobs(log) == choice["logprobs"]


def test_an_echo_needs_no_logprobs() -> None:
    log = completion(echo=True).say(" d").finish(".")

    assert streamed_text(log) == log.whole()["choices"][0]["text"] == "a b c d."


def test_each_choice_echoes_its_own_prompt() -> None:
    log = completion(
        echo=True, logprobs=0, num_prompts=2, num_choices=2, prompts=[["x", "y"], ["z"]]
    ).score()
    for choice in range(4):
        log.finish(str(choice), choice=choice)

    choices = log.whole()["choices"]

    assert [choice["text"] for choice in choices] == ["xy0", "xy1", "z2", "z3"]
    assert [streamed_text(log, k) for k in range(4)] == ["xy0", "xy1", "z2", "z3"]
    assert [streamed_logprobs(log, k) for k in range(4)] == [c["logprobs"] for c in choices]


def test_the_most_likely_choices_are_returned() -> None:
    rendering = context_of(endpoint="completions", best_of=3, num_choices=2, is_stream=False)
    choices = tuple(
        Choice(
            token_ids=(1,),
            text=text,
            finish_reason="stop",
            num_prompt_tokens=5,
            logprobs=(told_as(text),) * num_tokens,
        )
        for text, num_tokens in (("none", 0), ("one", 1), ("two", 2))
    )

    builder = AnswerBuilder(rendering)
    builder.take(Completed(request_id="r", choices=choices))
    answer: Any = whole_answer(builder)

    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "one"), (1, "two")]
    assert answer.choices[0].logprobs is None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 3)


def test_prompt_logprobs_are_each_choices_own() -> None:
    log = completion(prompt_logprobs=0, is_stream=False).score().finish("x")

    (choice,) = log.whole()["choices"]

    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1]["2"]["decoded_token"] == " b"
    assert choice["text"] == "x"
