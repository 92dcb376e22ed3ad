"""Groups of layers that keep unequal parts of a sequence, seen from outside."""

from dataclasses import replace
from itertools import count

import pytest

from tests.support.models.engine import (
    VOCAB_SIZE,
    SmallEngine,
    by_sequence,
    expected_outputs,
    new_submit,
)
from worker.engine.cache.block_pool import BlockCounts
from worker.engine.cache.layout import (
    CacheGroup,
    ChunkCache,
    FullCache,
    LatentCache,
    StateCache,
    WindowCache,
)
from worker.engine.interface import CancelSequence, StepOutput, Submit

BLOCK_SIZE = 4
EVERY = 8
STATE = StateCache(num_blocks=2, every=EVERY)
ALL: list[CacheGroup] = [FullCache(), WindowCache(6), ChunkCache(8), LatentCache(), STATE]
PROMPT = [(3 * k * k + k) % VOCAB_SIZE for k in range(40)]


def new_engine(
    *groups: CacheGroup,
    num_blocks: int = 200,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_draft_tokens: int = 0,
    prediction_cost: float | None = None,
    vocab_size: int = VOCAB_SIZE,
) -> SmallEngine:
    return SmallEngine(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        prefix_cache=True,
        groups=groups,
        max_draft_tokens=max_draft_tokens,
        prediction_cost=prediction_cost,
        vocab_size=vocab_size,
        clock=count(step=0.001).__next__,  # steps take the same time, so that drafts are worth it
    )


def prompted(name: str, num_prompt: int, *tail: int, max_tokens: int = 2) -> Submit:
    return new_submit(name, prompt_ids=[*PROMPT[:num_prompt], *tail], max_tokens=max_tokens)


def token_ids(outputs: list[StepOutput]) -> list[int]:
    return [output.token_id for output in outputs]


def cached_after(engine: SmallEngine, submit: Submit) -> int:
    """Run a sequence, check its tokens, and return the number of cached prompt tokens."""
    outputs = by_sequence(engine.run(submit))[submit.sequence_id]
    assert token_ids(outputs) == token_ids(expected_outputs(submit))
    return outputs[0].num_cached_tokens


def starts_of(engine: SmallEngine, submit: Submit) -> list[int]:
    """The first tokens of the sequence's shares."""
    shares = [share for batch in engine.runner.batches for share in batch.sequences]
    return [share.start for share in shares if share.sequence_id == submit.sequence_id]


@pytest.mark.parametrize(
    ("groups", "num_blocks"),
    [([WindowCache(8)], 8), ([ChunkCache(8), WindowCache(2)], 14)],
    ids=["window", "chunk"],
)
def test_blocks_that_no_token_reads_any_more_are_freed_while_a_sequence_runs(
    groups: list[CacheGroup], num_blocks: int
) -> None:
    engine = new_engine(*groups, num_blocks=num_blocks, max_num_batched_tokens=16)
    submit = new_submit(num_prompt=100, max_tokens=60)
    outputs = engine.step([submit])
    num_held = []

    while engine.has_work:
        outputs += engine.step()
        num_held.append(engine.load().num_blocks - engine.load().num_free_blocks)

    assert max(num_held) < num_blocks
    assert max(num_held[-40:]) <= 5
    assert token_ids(outputs) == token_ids(expected_outputs(submit))


def test_a_window_that_is_freed_too_early_is_noticed() -> None:
    engine = new_engine(WindowCache(5), num_blocks=8, max_num_batched_tokens=8)
    engine.runner.groups = [WindowCache(12)]

    with pytest.raises(ValueError, match="has been released"):
        engine.run(new_submit(num_prompt=30))


def test_as_many_sequences_run_as_the_blocks_behind_their_windows_allow() -> None:
    submits = [new_submit(f"s{k}", num_prompt=40, max_tokens=40) for k in range(4)]
    full = new_engine(FullCache(), num_blocks=40)
    windows = new_engine(WindowCache(8), num_blocks=40)

    for engine in (full, windows):
        engine.run(*submits)

    assert full.load().num_preemptions > 0
    assert windows.load().num_preemptions == 0


def test_a_prompt_with_a_state_is_cut_where_snapshots_are_due() -> None:
    engine = new_engine(FullCache(), STATE)
    submit = prompted("a", 21)

    engine.run(submit)

    assert starts_of(engine, submit) == [0, 8, 16, 21]


def test_a_snapshot_leaves_room_for_another_prompt_in_the_step() -> None:
    engine = new_engine(STATE)

    engine.step([prompted("a", 20), new_submit("b", num_prompt=5)])

    assert engine.num_tokens_by_step == [[8, 5]]


def test_the_next_turn_of_a_chat_starts_at_the_last_snapshot() -> None:
    engine = new_engine(*ALL)
    first = prompted("first", 10, max_tokens=12)
    answer = token_ids(engine.run(first))

    # Of the answer, all but the last token was computed: 21 tokens in all.
    assert cached_after(engine, prompted("second", 10, *answer, 1, 2)) == 16


@pytest.mark.parametrize(
    ("groups", "num_cached"),
    [
        ([FullCache()], 28),
        ([FullCache(), STATE], 24),
        ([WindowCache(6)], 28),
        ([STATE, WindowCache(6)], 24),
        (ALL, 24),
    ],
)
def test_a_prefix_is_found_as_far_as_all_groups_have_it(
    groups: list[CacheGroup], num_cached: int
) -> None:
    engine = new_engine(*groups)
    cached_after(engine, prompted("first", 31))

    assert cached_after(engine, prompted("second", 31)) == num_cached
    assert cached_after(engine, prompted("third", 13, 1, 1, 1)) == min(num_cached, 12) // 8 * 8 + (
        0 if STATE in groups else 4
    )


def test_evicted_snapshots_are_not_found() -> None:
    found = []
    for num_other in (4, 16, 32, 48):
        engine = new_engine(FullCache(), STATE, num_blocks=24)
        cached_after(engine, prompted("first", 30))
        engine.run(new_submit("other", prompt_ids=[1] * num_other, max_tokens=1))
        found.append(cached_after(engine, prompted("again", 30)))

    assert found == sorted(found, reverse=True)
    assert (found[0], found[-1]) == (24, 0)
    assert all(num_cached % EVERY == 0 for num_cached in found)


def test_a_preempted_sequence_restarts_at_its_last_snapshot() -> None:
    engine = new_engine(*ALL, max_num_seqs=1)
    batch = replace(prompted("batch", 18, max_tokens=9), job_class="batch")
    outputs = engine.step([batch]) + engine.step() + engine.step() + engine.step()

    outputs += engine.run(new_submit("interactive", num_prompt=6, max_tokens=2))

    assert engine.load().num_preemptions == 1
    assert starts_of(engine, batch)[:5] == [0, 8, 16, 18, 16]
    own = by_sequence(outputs)[batch.sequence_id]
    assert token_ids(own) == token_ids(expected_outputs(batch))


def test_a_state_is_computed_in_place_where_no_block_is_left_for_a_snapshot() -> None:
    engine = new_engine(STATE, num_blocks=4)
    submit = prompted("a", 30, max_tokens=10)

    assert cached_after(engine, submit) == 0

    assert engine.load().num_preemptions == 0


def test_sequences_that_share_a_snapshot_do_not_overwrite_it() -> None:
    engine = new_engine(*ALL)
    cached_after(engine, prompted("first", 17))
    submits = [prompted(name, 17, k, max_tokens=20) for k, name in enumerate("abc")]

    streams = by_sequence(engine.run(*submits))

    for submit in submits:
        own = streams[submit.sequence_id]
        assert token_ids(own) == token_ids(expected_outputs(submit))
        assert own[0].num_cached_tokens == 16
    assert cached_after(engine, prompted("last", 17)) == 16


def test_blocks_of_states_and_snapshots_are_counted_apart_from_those_of_tokens() -> None:
    engine = new_engine(FullCache(), STATE, num_blocks=50)

    engine.step([prompted("a", 20)])
    while_it_runs = engine.load().block_counts
    engine.run()

    assert while_it_runs == BlockCounts(tokens=5, states=2, cached_tokens=0, snapshots=0, empty=43)
    # There are snapshots after 8 and after 16 tokens.
    assert engine.load().block_counts == BlockCounts(
        tokens=0, states=0, cached_tokens=5, snapshots=4, empty=41
    )


def test_tenants_share_no_state() -> None:
    engine = new_engine(STATE)
    cached_after(engine, replace(prompted("first", 20), tenant="a"))

    assert cached_after(engine, replace(prompted("second", 20), tenant="b")) == 0
    assert cached_after(engine, replace(prompted("third", 20), tenant="a")) == 16


@pytest.mark.parametrize("max_num_batched_tokens", range(1, 42, 5))
def test_the_chunks_of_a_prompt_change_no_token(max_num_batched_tokens: int) -> None:
    engine = new_engine(
        *ALL, max_num_seqs=1, max_num_batched_tokens=max_num_batched_tokens, num_blocks=60
    )

    for num_prompt in (39, 40, 25):
        cached_after(engine, prompted(f"p{num_prompt}", num_prompt, max_tokens=20))


def test_drafts_change_no_token_whatever_layers_keep() -> None:
    submit = new_submit(prompt_ids=[1, 0] * 8, max_tokens=100)
    expected = token_ids(expected_outputs(submit, vocab_size=2))
    for groups in ([FullCache()], [FullCache(), WindowCache(5)], [FullCache(), STATE], [STATE]):
        engine = new_engine(*groups, max_draft_tokens=4, vocab_size=2)

        assert token_ids(engine.run(submit)) == expected
        assert engine.load().num_drafted_tokens > engine.load().num_accepted_tokens > 0


def test_a_cancelled_step_with_drafts_leaves_no_wrong_snapshot() -> None:
    """The step writes the state after its drafts, where a snapshot is due before them."""
    first = new_submit("first", prompt_ids=[1, 0] * 8, max_tokens=60)
    answer = token_ids(expected_outputs(first, vocab_size=2))
    second = new_submit("second", prompt_ids=[*first.prompt_ids, *answer], max_tokens=8)
    expected = token_ids(expected_outputs(second, vocab_size=2))
    for num_steps in range(1, 40):
        engine = new_engine(FullCache(), STATE, max_draft_tokens=4, vocab_size=2)
        engine.step([first])
        for _ in range(num_steps):
            engine.step()
        engine.step([CancelSequence(first.sequence_id)])

        assert token_ids(engine.run(second)) == expected


def test_a_predictor_drafts_where_the_text_does_not_repeat_itself() -> None:
    submit = new_submit(max_tokens=100)
    for groups in ([FullCache()], [FullCache(), STATE]):
        engine = new_engine(*groups, max_draft_tokens=4, prediction_cost=0.05)

        assert token_ids(engine.run(submit)) == token_ids(expected_outputs(submit))
        load = engine.load()
        assert load.num_drafted["predictor"] > load.num_accepted["predictor"] > 0


def test_nothing_is_predicted_that_takes_longer_than_it_saves() -> None:
    engine = new_engine(FullCache(), max_draft_tokens=4, prediction_cost=1.0)

    engine.run(new_submit(max_tokens=100))

    shares = [share for batch in engine.runner.batches for share in batch.sequences]
    assert not any(share.is_predicted for share in shares)
