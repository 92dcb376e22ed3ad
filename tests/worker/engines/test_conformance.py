"""What a job may expect of any engine: Warren's own, and each kind of server."""

import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from shared.bus.base import Bus
from shared.bus.memory import MemoryBus
from shared.messages import (
    Constraint,
    Failed,
    Finished,
    SamplingParams,
    TextPrompt,
    TokenDelta,
    TokenPrompt,
    UsageRecord,
    decode_record,
)
from shared.topology import LEDGER_RECORDS
from tests.support.network.engine_server import ScriptedEngine, engine_server
from tests.support.workers.jobs import Log, ask, ask_all, new_job
from tests.support.workers.synthetic import echo_worker, remote_worker
from worker.engines.adapters import ADAPTERS
from worker.text import Tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

OWN = "own"
WITH_TOKEN_IDS = [OWN, *(name for name, one in ADAPTERS.items() if one.traits.has_token_ids)]
CAPITALS = Constraint(kind="regex", source="[A-Z]{3}-[0-9]{2}")
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


class Place:
    """A worker of one kind of engine."""

    def __init__(self, bus: Bus, server: ScriptedEngine | None) -> None:
        self._bus = bus
        self.server = server
        self.model = "echo" if server is None else "smollm2"

    async def ask(self, sampling: SamplingParams, *prompts: TextPrompt | TokenPrompt) -> Log:
        return await ask(self._bus, new_job(self.model, *prompts, sampling=sampling))

    async def usage_of_three(self) -> list[UsageRecord]:
        """Run three requests at once; what they have used."""
        jobs = [new_job(self.model, sampling=SamplingParams(max_tokens=9)) for _ in range(3)]
        await ask_all(self._bus, jobs)
        waited_for = {job.request_id for job in jobs}
        records: list[UsageRecord] = []
        async with self._bus.consume(LEDGER_RECORDS.name) as consumer:
            while len(records) < len(jobs):
                delivery = await anext(consumer)
                await delivery.ack()
                record = decode_record(delivery.message.body)
                if record.request_id in waited_for:
                    records.append(record)
        return records


@asynccontextmanager
async def place_of(kind: str, tokenizer: Tokenizer, max_seq_len: int = 512) -> AsyncIterator[Place]:
    async with MemoryBus() as bus:
        if kind == OWN:
            async with echo_worker(bus, max_seq_len=max_seq_len):
                yield Place(bus, None)
        else:
            with engine_server(kind, tokenizer, max_seq_len=max_seq_len) as server:
                async with remote_worker(bus, server):
                    yield Place(bus, server)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[OWN, *ADAPTERS])
async def place(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> AsyncIterator[Place]:
    async with place_of(request.param, tokenizer) as place:
        yield place


@pytest.fixture
def token_place(place: Place) -> Place:
    """Skips servers that return text alone."""
    if place.server is not None and place.server.protocol not in WITH_TOKEN_IDS:
        pytest.skip("it returns no token ids")
    return place


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
    records = await place.usage_of_three()
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
    server = token_place.server
    if server is not None and not ADAPTERS[server.protocol].traits.can("logprobs"):
        pytest.skip("it has none")
    log = await token_place.ask(SamplingParams(max_tokens=6, logprobs=2))

    events = [event for event in log.raw if isinstance(event, TokenDelta | Finished)]
    scored = [one.chosen.token_id for event in events for one in event.logprobs]
    assert scored == log.token_ids


async def test_what_the_engine_lacks_is_refused_before_any_work(place: Place) -> None:
    if place.server is None:
        pytest.skip("it lacks nothing")
    num_before = len(place.server.bodies)
    values: dict[str, Any] = {
        "prompt_logprobs": 0,
        "logprobs": 1,
        "bad_words": ("a",),
        "min_tokens": 2,
    }
    for name in set(values).intersection(ADAPTERS[place.server.protocol].traits.unsupported):
        log = await place.ask(SamplingParams(max_tokens=6, **{name: values[name]}))

        assert isinstance(log.last, Failed)
        assert (log.last.code, log.last.param) == ("invalid_request", name)
    assert len(place.server.bodies) == num_before


async def test_characters_of_several_tokens_are_whole(
    token_place: Place, tokenizer: Tokenizer
) -> None:
    if token_place.server is None:
        pytest.skip("its tokens are not chosen")
    text = "🦔é漢字🏔"
    pieces = tokenizer.encode_text(text)
    token_place.server.script = pieces

    log = await token_place.ask(SamplingParams(max_tokens=len(pieces)))

    assert (log.token_ids, log.text) == (pieces, text)
