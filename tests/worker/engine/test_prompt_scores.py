"""Prompt scores: a score for each token, in order, and before the first drawn token."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.messages import SamplingParams
from tests.support.models.engine import (
    VOCAB_SIZE,
    SmallEngine,
    by_sequence,
    expected_outputs,
    new_submit,
)
from worker.engine.interface import SequenceId, Submit, TokenScore
from worker.engine.step_plan import MAX_SCORED_TOKENS
from worker.model.echo import next_score

SCORED = SamplingParams(prompt_logprobs=2)


def expected_scores(submit: Submit) -> list[TokenScore]:
    prompt = list(submit.prompt_ids)
    return [
        next_score(prompt[:k], prompt[k], submit.sampling.prompt_logprobs or 0, VOCAB_SIZE)
        for k in range(1, len(prompt))
    ]


def scores(engine: SmallEngine, sequence_id: SequenceId) -> list[TokenScore]:
    return [s for one in engine.scored if one.sequence_id == sequence_id for s in one.scores]


@given(
    lengths=st.lists(st.integers(2, 30), min_size=1, max_size=4),
    max_tokens=st.sampled_from([0, 1, 9]),
    num_blocks=st.integers(10, 30),
    budget=st.integers(8, 40),
)
@settings(max_examples=80, deadline=None)
def test_prompts_are_scored_whoever_else_runs(
    lengths: list[int], max_tokens: int, num_blocks: int, budget: int
) -> None:
    """Even if blocks run out, or if the prefix cache contains them."""
    engine = SmallEngine(num_blocks=num_blocks, max_num_batched_tokens=budget, prefix_cache=True)
    submits = [
        replace(
            new_submit("a", num_prompt, max_tokens, choice=k, sampling=SCORED), scores_prompt=True
        )
        for k, num_prompt in enumerate(lengths)
    ]
    others = [new_submit("a", 12, 8, choice=9)]

    streams = by_sequence(engine.run(*others, *submits))

    for submit in submits:
        assert scores(engine, submit.sequence_id) == expected_scores(submit)
        drawn = [output.token_id for output in streams.get(submit.sequence_id, [])]
        assert drawn == [output.token_id for output in expected_outputs(submit)]
    assert engine.load().num_free_blocks == engine.load().num_blocks
    assert not engine.has_work


def test_a_step_scores_so_many_tokens_at_most() -> None:
    engine = SmallEngine(num_blocks=400, max_num_batched_tokens=600)
    submits = [
        replace(new_submit(name, 400, 2, sampling=SCORED), scores_prompt=True) for name in "ab"
    ]

    engine.run(*submits)

    batches = [sum(len(share.scored_ids) for share in b.sequences) for b in engine.runner.batches]
    assert max(batches) <= MAX_SCORED_TOKENS
    assert sum(batches) == 2 * 399
    for submit in submits:
        assert scores(engine, submit.sequence_id) == expected_scores(submit)


def test_a_long_prompt_is_scored_however_many_short_ones_are() -> None:
    engine = SmallEngine(num_blocks=2000, max_num_batched_tokens=600, max_num_seqs=64)
    long = replace(
        new_submit("long", 2000, max_tokens=0, sampling=SCORED, choice=0), scores_prompt=True
    )
    engine.step([long])

    for number in range(16):
        shorts = [
            replace(
                new_submit(f"{number}-{k}", 100, max_tokens=0, sampling=SCORED), scores_prompt=True
            )
            for k in range(6)
        ]
        engine.step(shorts)

    assert len(scores(engine, long.sequence_id)) >= 16 * MAX_SCORED_TOKENS // 2 - 600


def test_scores_come_before_the_first_token() -> None:
    engine = SmallEngine(max_num_batched_tokens=8)
    submit = replace(new_submit(num_prompt=20, sampling=SCORED), scores_prompt=True)
    outputs = engine.step([submit])
    while not outputs:
        outputs = engine.step()

    assert len(scores(engine, submit.sequence_id)) == 19


def test_a_sequence_that_is_only_scored_says_so_at_its_end() -> None:
    engine = SmallEngine(max_num_batched_tokens=8)
    submit = replace(new_submit(num_prompt=20, max_tokens=0, sampling=SCORED), scores_prompt=True)

    assert engine.run(submit) == []

    assert [one.finish_reason for one in engine.scored] == [None, None, "length"]


def test_a_single_token_has_no_score() -> None:
    submit = replace(new_submit(num_prompt=1, max_tokens=0, sampling=SCORED), scores_prompt=True)
    with pytest.raises(ValueError, match="has no score"):
        SmallEngine().step([submit])
