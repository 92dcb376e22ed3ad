"""What the parameters of a request do to the answer of a real model: at Warren's own engine, and at
the real servers that ``make engines`` finds."""

import json
import math
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from jsonschema import validate

from shared.messages import (
    ChatMessage,
    ChatPrompt,
    Constraint,
    Finished,
    SamplingParams,
    TextPrompt,
    TokenDelta,
    TokenLogprobs,
)
from tests.support.engines.places import Place, real_place
from tests.support.engines.real_servers import real_engines
from tests.support.workers.jobs import Log
from worker.text import Tokenizer

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="module")]

if not (FOUND := real_engines()):
    pytest.skip("the environment names no server: use make engines", allow_module_level=True)

PROMPT = TextPrompt(text="The capital of France is")
CHAT = ChatPrompt(messages=(ChatMessage(role="user", content="Name a colour and a number."),))
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
END_ID = 2
"""SmolLM2's <|im_end|>."""
BANNED = -100.0

AS_GREEDY: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 1},
    "top_p": {"top_p": 1e-6},
    "min_p": {"min_p": 1.0},
    "temperature": {"temperature": 0.0, "top_p": 0.5, "top_k": 7, "seed": 3},
}
SCHEMAS: dict[str, Any] = {
    "integer": {"type": "integer", "minimum": 10, "maximum": 99},
    "enum": {"enum": ["red", "green", "blue"]},
    "object": {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}, "n": {"type": "integer"}},
        "required": ["colour", "n"],
        "additionalProperties": False,
    },
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 3},
    "nested": {
        "type": "object",
        "properties": {
            "a": {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"]}
        },
        "required": ["a"],
    },
    "short string": {"type": "string", "maxLength": 12},
    "unicode": {"const": "🦔 漢字 é 🏔"},
}
EXPRESSIONS = {
    "code": "[A-Z]{3}-[0-9]{2}",
    "choice": "yes|no|perhaps",
    "unicode": "🦔é漢字🏔",
    "empty or a letter": "[ab]?",
}
GRAMMAR = 'start: "[" NUMBER ("," NUMBER){2} "]"\nNUMBER: /[0-9]{1,2}/'


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[None, *FOUND],
    ids=lambda engine: "own" if engine is None else engine.name,
)
async def place(request: pytest.FixtureRequest, smollm2: Path) -> AsyncIterator[Place]:
    async with real_place(request.param, smollm2) as place:
        yield place


def end_of(log: Log) -> Finished:
    """The only end of an answer."""
    assert isinstance(log.last, Finished), log.last
    assert sum(isinstance(event, Finished) for event in log.raw) == 1
    return log.last


def scores_of(log: Log) -> list[TokenLogprobs]:
    events = [event for event in log.raw if isinstance(event, TokenDelta | Finished)]
    return [one for event in events for one in event.logprobs]


def constrained(constraint: Constraint, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=80, constraint=constraint, **fields)


@pytest.mark.parametrize("name", AS_GREEDY)
async def test_parameters_that_leave_one_token_are_greedy(place: Place, name: str) -> None:
    greedy = await place.ask(GREEDY, PROMPT)
    log = await place.ask(SamplingParams(**{"max_tokens": 24, **AS_GREEDY[name]}), PROMPT)

    assert log.token_ids == greedy.token_ids


async def test_a_bias_forces_and_bans_tokens(place: Place) -> None:
    greedy = await place.ask(GREEDY, PROMPT)
    first = greedy.token_ids[0]
    forced = await place.ask(SamplingParams(max_tokens=4, logit_bias={1234: 100.0}), PROMPT)
    banned = await place.ask(
        SamplingParams(max_tokens=24, temperature=0.0, logit_bias={first: BANNED}), PROMPT
    )

    assert forced.token_ids == [1234] * 4
    assert first not in banned.token_ids


async def test_penalties_lead_away_from_what_was_said(place: Place) -> None:
    prompt = TextPrompt(text="one two one two one two one two one two")
    plain = await place.ask(GREEDY, prompt)
    for name in ("presence_penalty", "frequency_penalty"):
        sampling = msgspec.structs.replace(GREEDY, **{name: 2.0})
        log = await place.ask(sampling, prompt)

        assert len(set(log.token_ids)) > len(set(plain.token_ids)), name
    strong = msgspec.structs.replace(GREEDY, repetition_penalty=5.0)
    log = await place.ask(strong, prompt)

    assert len(set(log.token_ids)) > len(set(plain.token_ids))


async def test_only_allowed_tokens_are_drawn(place: Place) -> None:
    allowed = (28, 339, 260, 7042)
    log = await place.ask(SamplingParams(max_tokens=10, allowed_token_ids=allowed), PROMPT)

    assert (len(log.token_ids), set(log.token_ids) - {*allowed}) == (10, set())


async def test_no_end_comes_before_the_minimum(place: Place) -> None:
    towards_the_end = {END_ID: 100.0}
    log = await place.ask(
        SamplingParams(max_tokens=24, min_tokens=12, logit_bias=towards_the_end), PROMPT
    )

    assert (log.token_ids.index(END_ID), end_of(log).finish_reason) == (12, "stop")


async def test_the_end_of_the_text_does_not_end_what_ignores_it(place: Place) -> None:
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    log = await place.ask(sampling, TextPrompt(text="<|im_start|>assistant\nYes.<|im_end|>\n"))

    assert (len(log.token_ids), end_of(log).finish_reason) == (12, "length")


async def test_a_stop_token_ends_the_answer(place: Place) -> None:
    whole = await place.ask(GREEDY, PROMPT)
    stop_id = whole.token_ids[7]
    log = await place.ask(msgspec.structs.replace(GREEDY, stop_token_ids=(stop_id,)), PROMPT)

    assert log.token_ids == whole.token_ids[: whole.token_ids.index(stop_id) + 1]
    assert end_of(log).stop_reason == stop_id


async def test_greedy_choices_of_two_prompts_are_those_of_single_requests(place: Place) -> None:
    prompts = (PROMPT, TextPrompt(text="Water boils at"))
    alone = [await place.ask(GREEDY, prompt) for prompt in prompts]
    log = await place.ask(GREEDY, *prompts, n=2)

    whole = [chain.token_ids[:4] for chain in log.reader.chains]
    assert whole == [one.token_ids[:4] for one in alone for _ in range(2)]


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
async def test_logprobs_are_those_of_the_model(place: Place, num_top: int) -> None:
    sampling = msgspec.structs.replace(GREEDY, logprobs=num_top)
    log = await place.ask(sampling, PROMPT)

    scores = scores_of(log)
    assert [score.chosen.token_id for score in scores] == log.token_ids
    for score in scores:
        values = [one.logprob for one in score.top]
        assert len(values) == num_top
        assert values == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) < 1.001
        assert score.chosen.logprob <= 0.0
        if num_top:
            assert score.top[0] == score.chosen


async def test_logprobs_do_not_depend_on_the_parameters_of_the_draw(place: Place) -> None:
    plain = await place.ask(SamplingParams(max_tokens=1, temperature=0.0, logprobs=5), PROMPT)
    edited = await place.ask(
        SamplingParams(max_tokens=1, temperature=2.0, top_k=1, logprobs=5, logit_bias={7: 3.0}),
        PROMPT,
    )

    first, second = (scores_of(log)[0].top for log in (plain, edited))
    assert [one.token_id for one in first] == [one.token_id for one in second]
    assert [one.logprob for one in first] == pytest.approx(
        [one.logprob for one in second], abs=0.02
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", SCHEMAS)
async def test_json_obeys_its_schema(place: Place, name: str, temperature: float) -> None:
    constraint = Constraint(kind="json_schema", source=json.dumps(SCHEMAS[name]))
    log = await place.ask(constrained(constraint, temperature=temperature), CHAT)

    assert end_of(log).finish_reason == "stop"
    validate(json.loads(log.text), SCHEMAS[name])


@pytest.mark.parametrize("name", EXPRESSIONS)
async def test_text_matches_its_expression(place: Place, name: str) -> None:
    constraint = Constraint(kind="regex", source=EXPRESSIONS[name])
    log = await place.ask(constrained(constraint), CHAT)

    assert end_of(log).finish_reason == "stop"
    assert re.fullmatch(EXPRESSIONS[name], log.text)


async def test_text_is_of_its_grammar(place: Place) -> None:
    log = await place.ask(constrained(Constraint(kind="lark", source=GRAMMAR)), CHAT)

    assert re.fullmatch(r"\[\d{1,2},\d{1,2},\d{1,2}\]", log.text)


async def test_logprobs_and_a_schema_go_together(place: Place) -> None:
    constraint = Constraint(kind="json_schema", source=json.dumps(SCHEMAS["object"]))
    log = await place.ask(constrained(constraint, logprobs=2), CHAT)

    assert [score.chosen.token_id for score in scores_of(log)] == log.token_ids


async def test_an_answer_may_be_empty(place: Place) -> None:
    nothing = await place.ask(SamplingParams(max_tokens=0), PROMPT)
    end_at_once = await place.ask(
        SamplingParams(max_tokens=9, temperature=0.0, logit_bias={END_ID: 100.0}), PROMPT
    )

    assert (nothing.text, end_of(nothing).finish_reason) == ("", "length")
    assert (end_at_once.token_ids, end_at_once.text) == ([END_ID], "")
    assert end_of(end_at_once).finish_reason == "stop"


@pytest.mark.parametrize(
    "text", ["🦔🦔🦔🦔🦔🦔", "漢字漢字漢字漢字", "Привет, мир! Привет,", "é ü ñ é ü ñ é"]
)
async def test_characters_in_pieces_are_whole(
    place: Place, tokenizer: Tokenizer, text: str
) -> None:
    log = await place.ask(
        SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True), TextPrompt(text=text)
    )

    assert len(log.token_ids) == 20
    assert log.text == tokenizer.decode(log.token_ids)
