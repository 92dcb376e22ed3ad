"""What a job may expect of any engine: Warren's own, and each kind of server."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio

from gateway.api.bodies.tool_choice import ToolUse
from shared.messages import (
    ChatMessage,
    ChatPrompt,
    Constraint,
    Failed,
    Finished,
    PromptScores,
    SamplingParams,
    TextPrompt,
    TokenDelta,
    TokenPrompt,
    Tool,
    UsageRecord,
    decode_record,
)
from shared.topology import LEDGER_RECORDS
from tests.support.engines.places import OWN, Place, place_of, real_place
from tests.support.engines.real_servers import RealEngine, real_engines, real_text_engines
from tests.support.workers.jobs import Log, ask, ask_all
from worker.engines.adapters import ADAPTERS
from worker.text import Tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

FOUND = real_engines()
REAL = [
    pytest.param(engine, id=f"real {engine.label}", marks=pytest.mark.engines)
    for engine in (*FOUND, *real_text_engines())
]
REAL_OWN = [pytest.param(None, id="real own", marks=pytest.mark.engines)] * bool(FOUND)
PROMPT = TextPrompt(text="The capital of France is")
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
FIRST_ORDINARY_ID = 17
"""SmolLM2's special tokens come before it."""
PATIENCE_S = 240.0
CAPITALS = Constraint(kind="regex", source="[A-Z]{3}-[0-9]{2}")
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "cool": {"temperature": 0.3},
    "hot": {"temperature": 2.0},
    "top_p": {"top_p": 0.5},
    "top_k": {"top_k": 40},
    "min_p": {"min_p": 0.1},
    "all of them": {"top_k": 40, "top_p": 0.9, "min_p": 0.05, "temperature": 0.8},
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.5},
    "negative penalties": {"presence_penalty": -1.0, "frequency_penalty": -1.0},
    "bias": {"logit_bias": {1000: 5.0, 1001: -5.0}},
    "without an end": {"ignore_eos": True},
    "minimum": {"min_tokens": 10},
    "negative seed": {"seed": -5},
    "large seed": {"seed": (1 << 63) - 1},
    "special tokens": {"skip_special_tokens": False},
}
PERSON = Constraint(
    kind="json_schema",
    source=json.dumps(
        {
            "type": "object",
            "properties": {"age": {"type": "integer", "maximum": 99}, "is": {"type": "boolean"}},
            "required": ["age", "is"],
        }
    ),
)

WEATHER = Tool(
    name="get_weather",
    description="The weather of a city.",
    parameters={
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
)


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=[OWN, *ADAPTERS, *REAL_OWN, *REAL]
)
async def place(
    request: pytest.FixtureRequest, smollm2: Path, tokenizer: Tokenizer
) -> AsyncIterator[Place]:
    engine: str | RealEngine | None = request.param
    opened = place_of(engine, tokenizer) if isinstance(engine, str) else real_place(engine, smollm2)
    async with opened as place:
        yield place


@pytest.fixture
def token_place(place: Place) -> Place:
    """Skips servers that return text alone."""
    if not place.has_token_ids:
        pytest.skip("it returns no token ids")
    return place


@pytest.fixture
def slow_place(place: Place) -> Iterator[Place]:
    """Its answers of hundreds of tokens take their time: those of a script wait in the middle."""
    if place.script is None:
        if place.traits is None and place.model == "echo":
            pytest.skip("it is too fast")
        yield place
        return
    place.script.may_continue.clear()
    place.script.paused_after = 10
    yield place
    place.script.paused_after = None
    place.script.may_continue.set()


def skip_without(place: Place, *parameters: str) -> None:
    if not all(map(place.can, parameters)):
        pytest.skip("the engine lacks a parameter")


def long_answer(place: Place) -> SamplingParams:
    return SamplingParams(max_tokens=480, temperature=0.0, ignore_eos=place.can("ignore_eos"))


async def usage_of_three(place: Place) -> list[UsageRecord]:
    """Run three requests at once; what they have used."""
    jobs = [place.new_job(SamplingParams(max_tokens=9)) for _ in range(3)]
    await ask_all(place.bus, jobs)
    waited_for = {job.request_id for job in jobs}
    records: list[UsageRecord] = []
    async with place.bus.consume(LEDGER_RECORDS.name) as consumer:
        while len(records) < len(jobs):
            delivery = await anext(consumer)
            await delivery.ack()
            record = decode_record(delivery.message.body)
            if record.request_id in waited_for:
                records.append(record)
    return records


def end_of(log: Log) -> Finished:
    assert isinstance(log.last, Finished), log.last
    return log.last


async def test_an_answer_has_as_many_tokens_as_were_asked_for(
    place: Place, tokenizer: Tokenizer
) -> None:
    log = await place.ask(SamplingParams(max_tokens=9, temperature=0.0))

    assert (len(log.token_ids), end_of(log).finish_reason) == (9, "length")
    assert log.text == tokenizer.decode(log.token_ids)


async def test_requests_at_once_share_the_time_of_the_machine(place: Place) -> None:
    began = time.monotonic()
    records = await usage_of_three(place)
    elapsed_s = time.monotonic() - began

    assert all(0 < record.compute_s <= (record.run_s or 0) for record in records)
    assert sum(record.compute_s for record in records) <= elapsed_s


async def test_an_answer_may_be_one_token(place: Place) -> None:
    log = await place.ask(SamplingParams(max_tokens=1))

    assert (len(log.token_ids), end_of(log).finish_reason) == (1, "length")


async def test_equal_requests_have_equal_answers(place: Place) -> None:
    first = await place.ask(SamplingParams(max_tokens=12, temperature=0.0))
    second = await place.ask(SamplingParams(max_tokens=12, temperature=0.0))

    assert first.token_ids == second.token_ids


async def test_every_choice_of_every_prompt_ends(place: Place) -> None:
    job_log = await place.ask(
        SamplingParams(max_tokens=5), TextPrompt(text="One"), TextPrompt(text="Two")
    )

    ends = [event for event in job_log.raw if isinstance(event, Finished)]
    assert sorted(end.choice for end in ends) == [0, 1]


async def test_prompt_and_answer_may_fill_the_context(place: Place) -> None:
    log = await place.ask(
        SamplingParams(max_tokens=12),
        TokenPrompt(token_ids=(1200,) * 500),
    )

    assert end_of(log).finish_reason in ("length", "stop")


async def test_more_than_the_context_is_refused(place: Place) -> None:
    log = await place.ask(SamplingParams(max_tokens=13), TokenPrompt(token_ids=(1200,) * 500))

    assert isinstance(log.last, Failed)
    assert log.last.code == "context_length_exceeded"


async def test_an_end_token_ends_the_answer_and_is_no_part_of_the_text(
    place: Place, tokenizer: Tokenizer
) -> None:
    log = await place.ask(SamplingParams(max_tokens=500))

    end = end_of(log)
    if end.finish_reason == "stop":
        assert end.has_end_token
        assert log.token_ids[-1] in tokenizer.eos_ids
        assert log.text == tokenizer.decode(log.token_ids[:-1])


async def test_a_stop_token_ends_the_answer(token_place: Place) -> None:
    whole = await token_place.ask(SamplingParams(max_tokens=10, temperature=0.0))
    stop_id = whole.token_ids[4]

    log = await token_place.ask(
        SamplingParams(max_tokens=10, temperature=0.0, stop_token_ids=(stop_id,))
    )

    assert end_of(log).stop_reason == stop_id
    assert log.token_ids[-1] == stop_id


async def test_no_end_token_comes_before_the_minimum(
    token_place: Place, tokenizer: Tokenizer
) -> None:
    log = await token_place.ask(SamplingParams(max_tokens=400, min_tokens=300))

    assert len(log.token_ids) >= 300
    assert not tokenizer.eos_ids.intersection(log.token_ids[:300])


async def test_only_allowed_tokens_are_drawn(token_place: Place) -> None:
    allowed = (1100, 1200, 1300)

    log = await token_place.ask(SamplingParams(max_tokens=20, allowed_token_ids=allowed))

    assert len(log.token_ids) == 20
    assert set(log.token_ids) <= set(allowed)


@pytest.mark.parametrize("constraint", [CAPITALS, PERSON], ids=["regex", "json"])
async def test_the_answer_satisfies_its_constraint(
    token_place: Place, constraint: Constraint
) -> None:
    log = await token_place.ask(SamplingParams(max_tokens=100, constraint=constraint))

    assert end_of(log).finish_reason == "stop"
    if constraint is PERSON:
        assert set(json.loads(log.text)) == {"age", "is"}
    else:
        assert re.fullmatch(constraint.source, log.text)


async def test_each_token_has_its_logprobs(token_place: Place) -> None:
    if not token_place.can("logprobs"):
        pytest.skip("it has none")
    log = await token_place.ask(SamplingParams(max_tokens=6, logprobs=2))

    events = [event for event in log.raw if isinstance(event, TokenDelta | Finished)]
    scored = [one.chosen.token_id for event in events for one in event.logprobs]
    assert scored == log.token_ids


@pytest.mark.parametrize("max_tokens", [0, 3])
async def test_each_token_of_the_prompt_has_its_logprobs(
    token_place: Place, max_tokens: int
) -> None:
    if not token_place.can("prompt_logprobs"):
        pytest.skip("it has none")
    prompt = TokenPrompt(token_ids=(1200, 1300, 1400))
    log = await token_place.ask(SamplingParams(max_tokens=max_tokens, prompt_logprobs=1), prompt)

    (scores,) = [event for event in log.raw if isinstance(event, PromptScores)]
    known = [one.chosen.token_id for one in scores.logprobs if one is not None]
    assert (scores.token_ids[-2:], known) == ((1300, 1400), [1300, 1400])
    assert all(len(one.top) == 1 for one in scores.logprobs if one is not None)
    assert len(log.token_ids) == max_tokens


async def test_what_the_engine_lacks_is_refused_before_any_work(place: Place) -> None:
    if place.traits is None:
        pytest.skip("it lacks nothing")
    num_before = 0 if place.script is None else len(place.script.bodies)
    values: dict[str, Any] = {
        "prompt_logprobs": 0,
        "logprobs": 1,
        "bad_words": ("a",),
        "min_tokens": 2,
    }
    for name in set(values).intersection(place.traits.unsupported):
        log = await place.ask(SamplingParams(max_tokens=6, **{name: values[name]}))

        assert isinstance(log.last, Failed)
        assert (log.last.code, log.last.param) == ("invalid_request", name)
    assert num_before == (0 if place.script is None else len(place.script.bodies))


async def test_characters_of_several_tokens_are_whole(
    token_place: Place, tokenizer: Tokenizer
) -> None:
    if token_place.script is None:
        pytest.skip("its tokens are not chosen")
    text = "🦔é漢字🏔"
    pieces = tokenizer.encode_text(text)
    token_place.script.script = pieces

    log = await token_place.ask(SamplingParams(max_tokens=len(pieces)))

    assert (log.token_ids, log.text) == (pieces, text)


async def test_an_answer_may_be_empty(place: Place) -> None:
    log = await place.ask(SamplingParams(max_tokens=0))

    assert (log.token_ids, log.text, end_of(log).finish_reason) == ([], "", "length")


async def test_a_deadline_ends_an_answer(place: Place) -> None:
    job = place.new_job(long_answer(place))
    log = await ask(place.bus, msgspec.structs.replace(job, deadline=time.time() - 1))

    assert isinstance(log.last, Failed)
    assert log.last.code == "deadline_exceeded"


async def test_the_longest_answer_ends_with_the_context(place: Place) -> None:
    prompt = TokenPrompt(token_ids=(1200,) * 490)
    log = await place.ask(SamplingParams(temperature=0.0), prompt)

    end = end_of(log)
    assert end.finish_reason == "stop" or len(log.token_ids) == place.max_seq_len - 490


@pytest.mark.parametrize("name", SAMPLINGS)
async def test_text_and_tokens_agree_and_are_the_same_again(
    place: Place, tokenizer: Tokenizer, name: str
) -> None:
    skip_without(place, *SAMPLINGS[name])
    sampling = SamplingParams(**{"max_tokens": 16, "seed": 11, **SAMPLINGS[name]})
    log = await place.ask(sampling, PROMPT)
    again = await place.ask(sampling, PROMPT)

    end = end_of(log)
    spoken = log.token_ids[:-1] if end.has_end_token else log.token_ids
    first_id = FIRST_ORDINARY_ID if sampling.skip_special_tokens else 0
    assert log.text == tokenizer.decode([one for one in spoken if one >= first_id])
    assert len(log.token_ids) == 16 if end.finish_reason == "length" else end.has_end_token
    assert again.token_ids == log.token_ids


async def test_other_seeds_lead_to_other_answers(place: Place) -> None:
    logs = [
        await place.ask(SamplingParams(max_tokens=16, temperature=1.5, seed=seed), PROMPT)
        for seed in range(3)
    ]

    assert len({log.text for log in logs}) == 3


@pytest.mark.parametrize("is_kept", [False, True], ids=["left out", "kept"])
async def test_a_stop_string_may_begin_and_end_inside_tokens(
    place: Place, tokenizer: Tokenizer, is_kept: bool
) -> None:
    whole = await place.ask(GREEDY, PROMPT)
    pieces = [tokenizer.decode([token_id]) for token_id in whole.token_ids]
    start = len("".join(pieces[:5])) + len(pieces[5]) // 2
    stop = whole.text[start : start + len(pieces[5])]
    sampling = msgspec.structs.replace(
        GREEDY, stop=("never said", stop), include_stop_in_output=is_kept
    )

    log = await place.ask(sampling, PROMPT)

    before = whole.text[: whole.text.index(stop)]
    assert log.text == before + (stop if is_kept else "")
    assert (end_of(log).finish_reason, end_of(log).stop_reason) == ("stop", stop)


async def test_a_stop_string_that_is_half_said_is_said(place: Place) -> None:
    whole = await place.ask(GREEDY, PROMPT)
    log = await place.ask(msgspec.structs.replace(GREEDY, stop=(f"{whole.text}!?!",)), PROMPT)

    assert log.text == whole.text


async def test_four_choices_differ_and_each_ends(place: Place) -> None:
    log = await place.ask(SamplingParams(max_tokens=16, temperature=1.2), PROMPT, n=4)

    ends = [event.choice for event in log.raw if isinstance(event, Finished)]
    answers = {tuple(chain.token_ids) for chain in log.reader.chains}
    assert (sorted(ends), len(answers)) == ([0, 1, 2, 3], 4)


async def test_a_tool_is_called_as_its_schema_says(place: Place) -> None:
    skip_without(place, "constraint")
    tools = ToolUse((WEATHER,), "hermes", True, True, {"tools.0.parameters": WEATHER})
    question = ChatMessage(role="user", content="How is the weather in Paris?")
    log = await place.ask(
        SamplingParams(max_tokens=80, constraint=tools.constraint(None)),
        ChatPrompt(messages=(question,), tools=(WEATHER,)),
    )

    call = json.loads(log.text.replace("<tool_call>", "").replace("</tool_call>", ""))
    assert (call["name"], call["arguments"]["city"] in ("Paris", "Rome")) == ("get_weather", True)


async def test_a_prompt_of_tokens_is_used_unchanged(place: Place, tokenizer: Tokenizer) -> None:
    token_ids = tuple(tokenizer.encode_text(PROMPT.text))
    of_text = await place.ask(GREEDY, PROMPT)
    of_tokens = await place.ask(GREEDY, TokenPrompt(token_ids=token_ids))

    assert of_tokens.token_ids == of_text.token_ids


async def test_a_prompt_may_have_unusual_and_special_tokens(token_place: Place) -> None:
    prompt = TokenPrompt(token_ids=(1, 0, 2, 49_151, 17, 1, 223, 128))
    log = await token_place.ask(SamplingParams(max_tokens=8, ignore_eos=True), prompt)

    assert len(log.token_ids) == 8


async def test_a_prompt_may_be_one_token(place: Place) -> None:
    log = await place.ask(SamplingParams(max_tokens=8), TokenPrompt(token_ids=(1234,)))

    assert end_of(log)


@pytest.mark.parametrize("num_left", [1, 2, 3, 4, 5, 12])
async def test_the_last_token_of_the_context_is_reached(token_place: Place, num_left: int) -> None:
    room = token_place.max_seq_len
    prompt = TokenPrompt(token_ids=((1200, 1300) * room)[: room - num_left])
    sampling = SamplingParams(max_tokens=num_left, temperature=0.0, ignore_eos=True)
    log = await token_place.ask(sampling, prompt)

    assert (len(log.token_ids), end_of(log).finish_reason) == (num_left, "length")


async def test_an_answer_without_a_limit_fills_the_context(token_place: Place) -> None:
    prompt = TokenPrompt(token_ids=(1200,) * (token_place.max_seq_len - 20))
    log = await token_place.ask(SamplingParams(temperature=0.0, ignore_eos=True), prompt)

    assert (len(log.token_ids), end_of(log).finish_reason) == (20, "length")


async def test_a_cancelled_answer_ends_at_the_engine(slow_place: Place) -> None:
    log = await slow_place.ask_and_cancel(long_answer(slow_place))

    assert isinstance(log.last, Failed)
    assert log.last.code == "cancelled"
    assert len(log.token_ids) < 480
    if slow_place.script is not None:
        assert await asyncio.to_thread(slow_place.script.num_closed.acquire, timeout=PATIENCE_S)
    elif slow_place.traits is not None and slow_place.traits.name == "llama-server":
        await no_slot_is_busy(slow_place)


async def no_slot_is_busy(place: Place) -> None:
    async with asyncio.timeout(PATIENCE_S), httpx.AsyncClient() as client:
        while True:
            slots = (await client.get(f"{place.url}/slots")).json()
            if not any(slot["is_processing"] for slot in slots):
                return
            await asyncio.sleep(0.02)


async def test_a_deadline_ends_a_running_answer(slow_place: Place) -> None:
    job = slow_place.new_job(long_answer(slow_place), PROMPT)
    log = await ask(slow_place.bus, msgspec.structs.replace(job, deadline=time.time() + 0.7))

    assert isinstance(log.last, Failed)
    assert log.last.code == "deadline_exceeded"


async def test_more_callers_than_slots_are_all_answered(token_place: Place) -> None:
    sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    prompts = [TextPrompt(text=f"Chapter {k}. It was") for k in range(16)]
    jobs = [token_place.new_job(sampling, prompt) for prompt in prompts]
    logs = await ask_all(token_place.bus, jobs)

    assert [len(log.token_ids) for log in logs] == [12] * 16
