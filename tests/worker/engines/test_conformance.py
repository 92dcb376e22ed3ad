"""What a job may expect of any engine: Warren's own, and each kind of server."""

import json
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from shared.messages import (
    Constraint,
    Failed,
    Finished,
    PromptScores,
    SamplingParams,
    TextPrompt,
    TokenDelta,
    TokenPrompt,
    UsageRecord,
    decode_record,
)
from shared.topology import LEDGER_RECORDS
from tests.support.engines.places import OWN, Place, place_of, real_place
from tests.support.engines.real_servers import RealEngine, real_engines
from tests.support.workers.jobs import Log, ask, ask_all
from worker.engines.adapters import ADAPTERS
from worker.text import Tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

REAL = [
    pytest.param(engine, id=f"real {engine.name}", marks=pytest.mark.engines)
    for engine in real_engines()
]
CAPITALS = Constraint(kind="regex", source="[A-Z]{3}-[0-9]{2}")
LONG = SamplingParams(max_tokens=400, temperature=0.0)
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


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[OWN, *ADAPTERS, *REAL])
async def place(
    request: pytest.FixtureRequest, smollm2: Path, tokenizer: Tokenizer
) -> AsyncIterator[Place]:
    engine: str | RealEngine = request.param
    opened = place_of(engine, tokenizer) if isinstance(engine, str) else real_place(engine, smollm2)
    async with opened as place:
        yield place


@pytest.fixture
def token_place(place: Place) -> Place:
    """Skips servers that return text alone."""
    if not place.has_token_ids:
        pytest.skip("it returns no token ids")
    return place


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
    log = await place.ask(SamplingParams(max_tokens=9))

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


async def test_a_stop_string_ends_the_answer_before_it(place: Place) -> None:
    whole = await place.ask(SamplingParams(max_tokens=30, temperature=0.0))
    stop = whole.text[9:13]

    log = await place.ask(SamplingParams(max_tokens=30, temperature=0.0, stop=(stop,)))

    assert (log.text, end_of(log).stop_reason) == (whole.text[: whole.text.index(stop)], stop)


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


async def test_each_of_several_choices_has_its_own_answer(token_place: Place) -> None:
    if token_place.script is not None:
        pytest.skip("it ignores seeds")
    log = await token_place.ask(SamplingParams(max_tokens=12, temperature=1.0), n=4)

    chains = [chain.token_ids for chain in log.reader.chains]
    assert len({tuple(token_ids) for token_ids in chains}) == 4


async def test_a_deadline_ends_an_answer(place: Place) -> None:
    job = place.new_job(LONG)
    log = await ask(place.bus, msgspec.structs.replace(job, deadline=time.time() - 1))

    assert isinstance(log.last, Failed)
    assert log.last.code == "deadline_exceeded"


async def test_the_longest_answer_ends_with_the_context(place: Place) -> None:
    prompt = TokenPrompt(token_ids=(1200,) * 490)
    log = await place.ask(SamplingParams(temperature=0.0), prompt)

    end = end_of(log)
    assert end.finish_reason == "stop" or len(log.token_ids) == place.max_seq_len - 490
