"""What a job may ask of its choices, through a whole worker with a synthetic engine."""

import json
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from shared.bus.memory import MemoryBus
from shared.messages import (
    ChatMessage,
    ChatPrompt,
    Completed,
    Constraint,
    Failed,
    Finished,
    GenerationJob,
    PromptScores,
    SamplingParams,
    Started,
    TextPrompt,
    TokenDelta,
    TokenLogprobs,
    TokenPrompt,
)
from tests.support.engines.brake import Brake
from tests.support.workers.jobs import Log, ask, new_job, publish, read, reading
from tests.support.workers.synthetic import echo_worker
from worker.decode import choices
from worker.decode.choices import ChoiceWriter
from worker.decode.constraints import Grammar, GrammarMatcher
from worker.engine.interface import StepOutput
from worker.text import Tokenizer

PROMPT = TokenPrompt(token_ids=tuple(range(100, 140)))


def job(
    *prompts: Any, num_choices: int = 1, mode: str = "stream", **sampling: Any
) -> GenerationJob:
    params = SamplingParams(**{"max_tokens": 12, "ignore_eos": True, **sampling})
    return msgspec.structs.replace(
        new_job("echo", *(prompts or (PROMPT,)), sampling=params, mode=mode),
        num_choices=num_choices,
    )


async def answer(asked: GenerationJob, **options: Any) -> Log:
    async with MemoryBus() as bus, echo_worker(bus, **options):
        return await ask(bus, asked)


def tokens(log: Log) -> list[list[int]]:
    return [chain.token_ids for chain in log.reader.chains]


def ends(log: Log) -> dict[int, Finished]:
    return {event.choice: event for event in log.raw if isinstance(event, Finished)}


def logprobs(log: Log) -> list[TokenLogprobs]:
    events = [event for event in log.raw if isinstance(event, TokenDelta | Finished)]
    return [told for event in events for told in event.logprobs]


def failure(log: Log) -> Failed:
    assert isinstance(log.last, Failed)
    return log.last


async def test_each_prompt_has_its_choices_and_each_choice_its_tokens() -> None:
    prompts = TextPrompt(text="one"), TextPrompt(text="two")
    log = await answer(job(*prompts, num_choices=3))

    assert len({tuple(chain) for chain in tokens(log)}) == 6
    assert isinstance(log.raw[0], Started)
    assert len(log.raw[0].num_prompt_tokens) == 2
    assert sorted(ends(log)) == list(range(6))


async def test_an_error_in_one_choice_fails_a_stream_behind_the_tokens_of_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    advance = ChoiceWriter.advance

    def fail_second(
        self: ChoiceWriter, outputs: Sequence[StepOutput], *, is_due: bool = True
    ) -> TokenDelta | Finished | None:
        if outputs and outputs[0].sequence_id.choice == 1:
            raise ZeroDivisionError("planted")
        return advance(self, outputs, is_due=is_due)

    monkeypatch.setattr(ChoiceWriter, "advance", fail_second)
    log = await answer(job(num_choices=2))

    assert failure(log).code == "internal_error"
    assert [len(chain) > 0 for chain in tokens(log)] == [True, False]


async def test_choices_share_the_blocks_of_their_prompt() -> None:
    shared = await answer(job(num_choices=4))

    assert [ends(shared)[k].num_cached_tokens for k in range(4)] == [0, 32, 32, 32]


async def test_the_first_choice_is_what_one_alone_would_be() -> None:
    assert tokens(await answer(job(num_choices=3)))[0] == tokens(await answer(job()))[0]


async def test_a_stop_token_ends_a_choice_and_is_named(tokenizer: Tokenizer) -> None:
    whole = await answer(job())
    stop_id = whole.token_ids[5]
    log = await answer(job(stop_token_ids=(stop_id,)))
    included = await answer(job(stop_token_ids=(stop_id,), include_stop_in_output=True))

    assert log.token_ids == whole.token_ids[:6]
    assert (ends(log)[0].finish_reason, ends(log)[0].stop_reason) == ("stop", stop_id)
    text = b"".join(map(tokenizer.token_bytes, log.token_ids[:-1])).decode(errors="replace")
    assert log.text == text
    assert len(included.text) > len(log.text)
    assert (ends(log)[0].has_end_token, ends(included)[0].has_end_token) == (True, False)


async def test_only_an_end_of_sequence_that_ends_the_answer_is_an_end_token(
    tokenizer: Tokenizer,
) -> None:
    (end_id, *_) = tokenizer.eos_ids
    asked: dict[str, Any] = {"allowed_token_ids": (end_id,), "max_tokens": 3, "logprobs": 0}
    log = await answer(job(**asked, ignore_eos=False))
    ignored = await answer(job(**asked))
    whole = (await answer(job(**asked, ignore_eos=False, mode="final"))).last

    assert (log.token_ids, ends(log)[0].has_end_token) == ([end_id], True)
    assert (ignored.token_ids, ends(ignored)[0].has_end_token) == ([end_id] * 3, False)
    assert len(logprobs(log)) == 1
    assert isinstance(whole, Completed)
    assert whole.choices[0].has_end_token


async def test_a_stop_string_may_be_left_in_the_text() -> None:
    whole = await answer(job(max_tokens=40))
    stop = whole.text[20:24]
    log = await answer(job(max_tokens=40, stop=(stop,), include_stop_in_output=True))

    assert log.text == whole.text[: whole.text.index(stop) + 4]
    assert ends(log)[0].stop_reason == stop


async def test_special_tokens_are_written_out_on_request() -> None:
    asked: dict[str, Any] = {"allowed_token_ids": (1, 2)}
    assert (await answer(job(**asked))).text == ""
    log = await answer(job(**asked, skip_special_tokens=False))
    names = {1: "<|im_start|>", 2: "<|im_end|>"}
    assert log.text == "".join(names[token_id] for token_id in log.token_ids)


async def test_logprobs_come_with_each_token(tokenizer: Tokenizer) -> None:
    log = await answer(job(logprobs=2))

    told = logprobs(log)
    assert [one.chosen.token_id for one in told] == log.token_ids
    assert [one.chosen.token for one in told] == [*map(tokenizer.token_bytes, log.token_ids)]
    assert {len(one.top) for one in told} == {2}


@pytest.mark.parametrize("skips_special", [True, False])
async def test_logprobs_measure_the_text_of_each_token(skips_special: bool) -> None:
    special: dict[str, Any] = {
        "allowed_token_ids": (1, 2, 65),
        "skip_special_tokens": skips_special,
    }
    log = await answer(job(logprobs=0, **special))

    told = logprobs(log)
    names = [one.chosen.token.decode() for one in told]
    texts = ["" if skips_special and name.startswith("<|") else name for name in names]
    assert set(texts) - set(names) == ({""} if skips_special else set())
    assert [one.num_chars for one in told] == [*map(len, texts)]
    assert log.text == "".join(texts)


@pytest.mark.parametrize(
    ("skips_special", "text", "counts"),
    [
        (True, "Hi\n\ufffd", [1, 0, 1, 1]),
        (False, "<|im_start|>Hi<|im_end|>\n\ufffd", [1, 10, 1, 1]),
    ],
)
async def test_a_prompt_of_token_ids_has_a_text_with_its_special_tokens_if_they_are_not_skipped(
    skips_special: bool, text: str, counts: list[int], tokenizer: Tokenizer
) -> None:
    (cut,) = [k for k in range(tokenizer.vocab_size) if tokenizer.token_bytes(k) == b"\xf0"]
    words = [tokenizer.encode_text(word) for word in ("H", "i", "\n")]
    (first,), (second,), (third,) = words
    prompt = TokenPrompt(token_ids=(1, first, second, 2, third, cut))
    asked = job(
        prompt, prompt_logprobs=0, max_tokens=0, skip_special_tokens=skips_special, mode="final"
    )
    completed = (await answer(msgspec.structs.replace(asked, wants_prompt_text=True))).last

    assert isinstance(completed, Completed)
    assert completed.prompt_texts == (text,)
    (scores,) = completed.prompt_logprobs
    assert [one and one.num_chars for one in scores] == [None, 1, *counts]


async def test_prompt_scores_come_first_and_in_chunks() -> None:
    prompt = TokenPrompt(token_ids=tuple(k % 1000 for k in range(2500)))
    log = await answer(job(prompt, prompt_logprobs=1, num_choices=2))

    events = [event for event in log.raw if isinstance(event, PromptScores)]
    assert log.raw[1:4] == events
    assert [event.start for event in events] == [0, 1024, 2048]
    assert [t for event in events for t in event.token_ids] == list(prompt.token_ids)
    told = [one for event in events for one in event.logprobs]
    assert told[0] is None
    assert [one.chosen.token_id for one in told if one is not None] == list(prompt.token_ids[1:])
    assert tokens(log) == tokens(await answer(job(prompt, num_choices=2)))


@pytest.mark.parametrize("length", [1, 2, 40, 1500])
async def test_a_prompt_may_be_scored_alone(length: int) -> None:
    prompt = TokenPrompt(token_ids=tuple(k % 1000 for k in range(length)))
    log = await answer(job(prompt, prompt_logprobs=0, max_tokens=0))

    events = [event for event in log.raw if isinstance(event, PromptScores)]
    assert [len(event.logprobs) for event in events] == ([1024, 476] if length > 1024 else [length])
    assert (ends(log)[0].finish_reason, log.token_ids) == ("length", [])


async def test_final_mode_says_the_same() -> None:
    asked: dict[str, Any] = {"num_choices": 2, "logprobs": 1, "prompt_logprobs": 1}
    streamed = await answer(job(**asked))
    wants_text = msgspec.structs.replace(job(**asked, mode="final"), wants_prompt_text=True)
    final = (await answer(wants_text)).last

    assert isinstance(final, Completed)
    assert [list(choice.token_ids) for choice in final.choices] == tokens(streamed)
    assert [len(choice.logprobs) for choice in final.choices] == [12, 12]
    (scores,) = [event for event in streamed.raw if isinstance(event, PromptScores)]
    assert final.prompt_logprobs == (scores.logprobs,)
    assert len(final.prompt_texts) == 1


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"enum": [1, 2]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


async def test_a_schema_decides_the_output_of_every_choice() -> None:
    constraint = Constraint(kind="json_schema", source=json.dumps(PERSON))
    log = await answer(job(num_choices=3, constraint=constraint, max_tokens=400))

    for choice, end in ends(log).items():
        text = "".join(
            e.text for e in log.raw if isinstance(e, TokenDelta | Finished) and e.choice == choice
        )
        assert set(json.loads(text)) == {"name", "age"}
        assert end.finish_reason == "stop"


async def test_a_grammar_that_is_replayed_leaves_the_event_loop_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choices, "_LONG_REPLAY", 0)
    replayed: list[tuple[int, bool]] = []
    matcher = Grammar.matcher

    def recorded(self: Grammar, output_ids: Sequence[int], *others: Any) -> GrammarMatcher:
        is_outside = threading.current_thread() is not threading.main_thread()
        replayed.append((len(output_ids), is_outside))
        return matcher(self, output_ids, *others)

    monkeypatch.setattr(Grammar, "matcher", recorded)
    asked = job(constraint=Constraint(kind="regex", source="(ab){300}"), max_tokens=600)
    async with MemoryBus() as bus, reading(bus, asked) as consumer:
        async with echo_worker(bus, brake=Brake(12), drain_grace_s=0.2):
            await publish(bus, asked)
            log = await read(bus, asked, consumer, num_tokens=10)
        async with echo_worker(bus):
            await read(bus, asked, consumer, log)

    assert ends(log)[0].finish_reason in {"stop", "length"}
    assert [is_outside for num_tokens, is_outside in replayed if num_tokens] == [True]


async def test_an_end_token_comes_only_where_the_grammar_accepts(tokenizer: Tokenizer) -> None:
    """The synthetic model draws end tokens as often as others, wherever it may."""
    constraint = Constraint(kind="lark", source='start: ("ab" | "cd")+')
    log = await answer(job(constraint=constraint, ignore_eos=False, num_choices=16))

    is_ended = [chain[-1] in tokenizer.eos_ids for chain in tokens(log)]
    texts = [b"".join(map(tokenizer.token_bytes, chain)) for chain in tokens(log)]
    assert any(is_ended)
    for text, has_end in zip(texts, is_ended, strict=True):
        body = text.split(b"<|")[0].decode()
        assert set(body[::2]) <= {"a", "c"}
        assert set(body[1::2]) <= {"b", "d"}
        assert not has_end or len(body) % 2 == 0


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"logit_bias": {1 << 20: 1.0}}, "logit_bias"),
        ({"stop_token_ids": (1 << 20,)}, "stop_token_ids"),
        ({"allowed_token_ids": (1 << 20,)}, "allowed_token_ids"),
        ({"allowed_token_ids": (1,) * (1 << 20)}, "allowed_token_ids"),
        ({"constraint": Constraint(kind="regex", source="(a")}, "response_format"),
        ({"constraint": Constraint(kind="lark", source="start: %%%")}, "response_format"),
        ({"constraint": Constraint(kind="json_schema", source="{")}, "response_format"),
        ({"constraint": Constraint(kind="json_schema", source='{"type": 1}')}, "response_format"),
        (
            {"constraint": Constraint(kind="regex", source="(" * 200 + "a" + ")*" * 200)},
            "response_format",
        ),
    ],
    ids=[
        "bias",
        "stop",
        "allowed",
        "more than all",
        "regex",
        "lark",
        "no json",
        "no schema",
        "too deep",
    ],
)
async def test_what_no_choice_can_follow_is_refused_before_any_work(
    sampling: dict[str, Any], param: str
) -> None:
    log = await answer(job(**sampling))

    assert len(log.raw) == 1
    assert (failure(log).code, failure(log).param) == ("invalid_request", param)


async def test_a_constraint_without_a_token_ends_the_request_with_a_reason() -> None:
    constraint = Constraint(kind="regex", source="[a-z]+")
    log = await answer(job(constraint=constraint, allowed_token_ids=(1,)))

    assert failure(log).code == "invalid_request"
    assert "no next token" in failure(log).message


async def test_chat_prompts_say_their_text() -> None:
    chat = ChatPrompt(messages=(ChatMessage(role="user", content="hello"),))
    asked = msgspec.structs.replace(job(chat), wants_prompt_text=True)
    started = (await answer(asked)).raw[0]

    assert isinstance(started, Started)
    assert "hello" in started.prompt_texts[0]
