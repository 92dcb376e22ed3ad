"""Biases, penalties, bans and constraints, against edits computed from all tokens each time."""

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace
from itertools import count, takewhile
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from shared.errors import InvalidRequest
from shared.messages import SamplingParams
from tests.support.models.engine import (
    VOCAB_SIZE,
    SmallEngine,
    by_sequence,
    expected_outputs,
    mask_of,
    new_submit,
    undrafted,
)
from worker.engine.engine import MAX_PREPARATION_S
from worker.engine.interface import Submit

EVEN = mask_of(range(0, VOCAB_SIZE, 2))

token_ids = st.integers(0, VOCAB_SIZE - 1)
samplings = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, -1.25]),
    logit_bias=st.dictionaries(token_ids, st.sampled_from([-1.0, 2.5]), max_size=3),
    min_tokens=st.integers(0, 9),
    stop_token_ids=st.lists(token_ids, max_size=8).map(tuple),
    logprobs=st.sampled_from([None, 0, 3]),
)
words = st.lists(st.lists(token_ids, min_size=1, max_size=3), max_size=12)


@st.composite
def submits(draw: st.DrawFn, name: str) -> Submit:
    return new_submit(
        name,
        num_prompt=draw(st.integers(1, 12)),
        max_tokens=draw(st.integers(1, 20)),
        eos_ids=draw(st.frozensets(token_ids, max_size=8)),
        sampling=draw(samplings),
        bad_words=draw(words),
        allowed=draw(st.sampled_from([None, EVEN])),
    )


@given(
    batch=st.tuples(*(submits(name) for name in "abcd")),
    num_blocks=st.integers(12, 40),
    preparation_s=st.sampled_from([0.0, MAX_PREPARATION_S / 2, 2 * MAX_PREPARATION_S]),
)
@settings(max_examples=80, deadline=None)
def test_each_draw_is_edited_as_its_sequence_alone_asks(
    batch: tuple[Submit, ...], num_blocks: int, preparation_s: float
) -> None:
    """Even if blocks run out and sequences are preempted, or if a step has no time for all."""
    clock = count(step=preparation_s)
    engine = SmallEngine(num_blocks=num_blocks, max_num_batched_tokens=9, clock=lambda: next(clock))

    streams = by_sequence(engine.run(*batch))

    assert {
        key: [structs.replace(o, num_cached_tokens=0) for o in streams[key]] for key in streams
    } == {submit.sequence_id: expected_outputs(submit) for submit in batch}


@given(submit=submits("a"), data=st.data())
@settings(max_examples=60, deadline=None)
def test_edits_go_on_where_another_worker_stopped(submit: Submit, data: st.DataObject) -> None:
    whole = expected_outputs(submit)
    num_known = data.draw(st.integers(0, len(whole) - 1))
    known = [output.token_id for output in whole[:num_known]]

    assert SmallEngine().run(replace(submit, output_ids=known)) == whole[num_known:]


class Alternating:
    """A `TokenConstraint` for alternating even and odd tokens, ``length`` of them."""

    def __init__(self, length: int = 99, *, output_ids: Iterable[int] = ()) -> None:
        self.num_taken = len(list(output_ids))
        self._length = length

    @property
    def is_complete(self) -> bool:
        return self.num_taken >= self._length

    def advance(self, token_id: int) -> None:
        assert token_id % 2 == self.num_taken % 2
        self.num_taken += 1

    def mask(self) -> bytes:
        return mask_of(self._allowed(self.num_taken))

    def forced_tokens(self) -> Sequence[int]:
        allowed = map(self._allowed, range(self.num_taken, self._length))
        return [ids[0] for ids in takewhile(lambda ids: len(ids) == 1, allowed)]

    def masks_after(self, token_ids: Sequence[int]) -> Sequence[bytes]:
        last = min(self.num_taken + len(token_ids), self._length - 1)
        return [mask_of(self._allowed(k)) for k in range(self.num_taken + 1, last + 1)]

    def _allowed(self, position: int) -> Sequence[int]:
        return range(position % 2, VOCAB_SIZE, 2)


class Spelled(Alternating):
    """Leaves no choice but at every fifth token."""

    def _allowed(self, position: int) -> Sequence[int]:
        allowed = super()._allowed(position)
        return allowed[position : position + 1] if position % 5 else allowed


def test_a_constraint_decides_every_token_and_the_end() -> None:
    submit = new_submit(max_tokens=30, constraint=Alternating(length=9))

    outputs = SmallEngine().run(submit, new_submit("other", max_tokens=20))

    stream = by_sequence(outputs)[submit.sequence_id]
    assert [output.token_id % 2 for output in stream] == [0, 1, 0, 1, 0, 1, 0, 1, 0]
    assert stream[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    "edits",
    [
        {"constraint": Spelled()},
        {"constraint": Spelled(length=23)},
        {"constraint": Spelled(), "sampling": SamplingParams(min_tokens=20, logprobs=2)},
    ],
    ids=["length", "complete", "min_tokens"],
)
def test_what_a_constraint_leaves_no_choice_of_takes_few_steps(edits: dict[str, Any]) -> None:
    submit = new_submit(max_tokens=30, **edits)
    plain = SmallEngine().run(submit_again(submit))
    clock = count(step=0.001).__next__  # steps take the same time, whatever they compute
    engine = SmallEngine(max_draft_tokens=6, clock=clock)

    outputs = by_sequence(engine.run(submit_again(submit)))[submit.sequence_id]

    assert undrafted(outputs) == plain
    assert engine.load().num_accepted_tokens >= len(plain) / 2
    assert len(engine.runner.batches) < len(plain) * 2 / 3


def submit_again(submit: Submit) -> Submit:
    """With a constraint of its own."""
    return replace(submit, constraint=copy(submit.constraint))


class Slow(Spelled):
    """Takes most of the time that a step has for constraints, for each draw and for each draft."""

    def __init__(self, clock: list[float]) -> None:
        super().__init__()
        self._clock = clock

    def mask(self) -> bytes:
        self._clock[0] += 0.8 * MAX_PREPARATION_S
        return super().mask()

    def masks_after(self, token_ids: Sequence[int]) -> Sequence[bytes]:
        self._clock[0] += 0.8 * MAX_PREPARATION_S
        return super().masks_after(token_ids)


def test_slow_constraints_take_turns_and_hold_up_nobody() -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 1e-6  # steps take time, whatever they compute
        return now[0]

    engine = SmallEngine(max_draft_tokens=4, clock=clock)
    slow = [new_submit(f"{k}", constraint=Slow(now), seed=k) for k in range(7)]
    long = new_submit("long", constraint=Slow(now), max_tokens=20)  # in the end it is alone
    other = new_submit("other", max_tokens=20)
    outputs, durations = engine.step([other, *slow, long]), []

    while engine.has_work:
        began_at = now[0]
        outputs += engine.step()
        durations.append(now[0] - began_at)

    streams = by_sequence(outputs)
    assert max(durations) < 2 * MAX_PREPARATION_S
    assert engine.load().num_drafted_tokens
    assert undrafted(streams[other.sequence_id]) == expected_outputs(other)
    assert {len(streams[one.sequence_id]) for one in slow} == {6}
    assert len(streams[long.sequence_id]) == 20


def test_a_neighbour_without_edits_yields_what_it_yields_alone() -> None:
    other = new_submit("other", max_tokens=20)

    streams = by_sequence(SmallEngine().run(new_submit(constraint=Alternating()), other))

    assert streams[other.sequence_id] == expected_outputs(other)


def test_a_constraint_goes_on_where_another_worker_stopped() -> None:
    whole = SmallEngine().run(new_submit(max_tokens=12, constraint=Alternating()))
    known = [output.token_id for output in whole[:5]]

    rest = SmallEngine().run(
        new_submit(max_tokens=12, output_ids=known, constraint=Alternating(output_ids=known))
    )

    assert rest == whole[5:]


class DeadEnd(Alternating):
    """Allows no token after ``length`` tokens, although it is not complete."""

    @property
    def is_complete(self) -> bool:
        return False

    def mask(self) -> bytes:
        return mask_of([]) if self.num_taken == self._length else super().mask()


@pytest.mark.parametrize("length", [0, 3])
def test_a_constraint_that_ends_in_nothing_ends_its_sequence_alone(length: int) -> None:
    engine = SmallEngine()
    submit, other = new_submit(max_tokens=9, constraint=DeadEnd(length)), new_submit("other")

    streams = by_sequence(engine.run(submit, other))

    (failed,) = engine.take_failed()
    assert failed.sequence_id == submit.sequence_id
    assert isinstance(failed.error, InvalidRequest)
    assert len(streams.get(submit.sequence_id, [])) == length
    assert streams[other.sequence_id] == expected_outputs(other)
    assert engine.load().num_free_blocks == engine.load().num_blocks


def test_bans_that_leave_no_token_are_refused() -> None:
    engine = SmallEngine()
    sampling = SamplingParams(min_tokens=2)

    engine.run(new_submit(eos_ids=frozenset([5]), allowed=mask_of([5]), sampling=sampling))

    (failed,) = engine.take_failed()
    assert isinstance(failed.error, InvalidRequest)


@pytest.mark.parametrize(
    "edits",
    [
        {"sampling": SamplingParams(frequency_penalty=0.5)},
        {"bad_words": [[1, 2]]},
        {"constraint": Alternating()},
    ],
    ids=["penalty", "word", "constraint"],
)
def test_a_draw_that_depends_on_the_last_token_waits_for_it(edits: dict[str, Any]) -> None:
    engine = SmallEngine()

    engine.run(new_submit(**edits), new_submit("other"))

    assert all(s.previous_row is None for b in engine.runner.batches for s in b.sequences)


@pytest.mark.parametrize(
    "edits",
    [
        {"sampling": SamplingParams(logit_bias={3: 1.0}, min_tokens=4, logprobs=2)},
        {"bad_words": [[1], [2]]},
        {"allowed": EVEN},
    ],
    ids=["bias", "words of one token", "allowed tokens"],
)
def test_other_draws_are_planned_while_the_step_before_computes(edits: dict[str, Any]) -> None:
    engine = SmallEngine()

    engine.run(new_submit(**edits))

    decodes = [batch.sequences[0] for batch in engine.runner.batches[1:]]
    assert [decode.previous_row for decode in decodes] == [0] * len(decodes)
