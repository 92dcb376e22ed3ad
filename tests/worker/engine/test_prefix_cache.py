"""Prefix sharing, seen from outside: which tokens are computed, and which are drawn."""

from dataclasses import replace

import pytest

from tests.support.models.engine import (
    VOCAB_SIZE,
    SmallEngine,
    by_sequence,
    expected_outputs,
    new_submit,
)
from worker.engine.cache.block_pool import BlockPool
from worker.engine.cache.layout import ONE_FULL
from worker.engine.interface import StepOutput, Submit
from worker.engine.sequence import Sequence
from worker.engine.sequence_cache import SequenceCache

BLOCK_SIZE = 4
PROMPT = [(3 * k * k + k) % VOCAB_SIZE for k in range(24)]


def caching_engine(
    num_blocks: int = 64, max_num_seqs: int = 8, max_num_batched_tokens: int = 64
) -> SmallEngine:
    return SmallEngine(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        prefix_cache=True,
    )


def prompted(name: str, num_prompt: int, *tail: int, max_tokens: int = 2) -> Submit:
    return new_submit(name, prompt_ids=[*PROMPT[:num_prompt], *tail], max_tokens=max_tokens)


def token_ids(outputs: list[StepOutput]) -> list[int]:
    return [output.token_id for output in outputs]


def cached_after(engine: SmallEngine, submit: Submit) -> int:
    """Run a sequence, check its tokens, and return the number of prompt tokens found in the
    cache."""
    outputs = by_sequence(engine.run(submit))[submit.sequence_id]
    assert token_ids(outputs) == token_ids(expected_outputs(submit))
    assert len({output.num_cached_tokens for output in outputs}) == 1
    return outputs[0].num_cached_tokens


@pytest.mark.parametrize(
    ("num_prompt", "num_cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (11, 8)]
)
def test_full_blocks_are_found_and_one_token_at_least_is_computed(
    num_prompt: int, num_cached: int
) -> None:
    engine = caching_engine()
    cached_after(engine, prompted("first", num_prompt))
    num_steps = len(engine.runner.batches)

    assert cached_after(engine, prompted("second", num_prompt)) == num_cached

    assert engine.num_tokens_by_step[num_steps] == [num_prompt - num_cached]


def test_nothing_is_found_where_it_is_off() -> None:
    engine = SmallEngine()
    cached_after(engine, prompted("first", 20))

    assert cached_after(engine, prompted("second", 20)) == 0


def test_prompts_share_as_far_as_they_are_alike() -> None:
    engine = caching_engine()
    cached_after(engine, prompted("first", 20))

    assert cached_after(engine, prompted("second", 10, 1, 1, 1, 1, 1)) == 8


def test_equal_blocks_behind_unequal_ones_are_not_shared() -> None:
    engine = caching_engine()
    cached_after(engine, new_submit("first", prompt_ids=[1, *PROMPT[1:20]]))

    assert cached_after(engine, new_submit("second", prompt_ids=[2, *PROMPT[1:20]])) == 0


def test_tenants_share_nothing() -> None:
    engine = caching_engine()
    cached_after(engine, replace(prompted("first", 20), tenant="a"))

    assert cached_after(engine, replace(prompted("second", 20), tenant="b")) == 0
    assert cached_after(engine, replace(prompted("third", 20), tenant="a")) == 16


def test_the_next_turn_of_a_chat_finds_the_answer_before_it() -> None:
    engine = caching_engine()
    first = prompted("first", 9, max_tokens=10)
    answer = token_ids(engine.run(first))

    # 9 tokens of the prompt and 9 of the answer were computed: an answer's last token never is.
    assert cached_after(engine, prompted("second", 9, *answer, 1, 2)) == 16


def test_a_sequence_that_another_worker_began_says_no_more_than_its_prompt() -> None:
    engine = caching_engine()
    submit = prompted("first", 9, max_tokens=12)
    known = token_ids(engine.run(submit))[:9]

    rest = engine.run(replace(submit, output_ids=known))

    assert token_ids(rest) == token_ids(expected_outputs(submit))[9:]
    assert {output.num_cached_tokens for output in rest} == {9}
    assert engine.num_tokens_by_step[-3] == [2]


def test_sequences_that_run_hold_their_common_blocks_together() -> None:
    engine = caching_engine(num_blocks=10)
    first, second = (prompted(name, 20, max_tokens=4) for name in ("first", "second"))
    engine.step([first])

    streams = by_sequence(engine.run(second))

    assert engine.load().num_preemptions == 0
    assert len(engine.runner.batches[1].sequences) == 2
    assert token_ids(streams[second.sequence_id]) == token_ids(expected_outputs(second))


def test_twins_of_one_step_do_not_read_what_the_other_writes() -> None:
    """The keys and values of a step may be written in any order."""
    engine = caching_engine()

    engine.run(*(prompted(name, 20) for name in "ab"), prompted("late", 20))

    assert engine.num_tokens_by_step[0] == [20, 20, 20]


def test_the_chunks_of_an_unfinished_prompt_are_found() -> None:
    engine = caching_engine(max_num_batched_tokens=9)
    engine.step([prompted("first", 24)])

    engine.step([prompted("second", 9, max_tokens=1)])

    assert engine.num_tokens_by_step[1] == [1, 8]


def test_a_preempted_sequence_finds_its_own_blocks() -> None:
    engine = caching_engine(max_num_seqs=1)
    batch = replace(prompted("batch", 14, max_tokens=9), job_class="batch")
    outputs = engine.step([batch]) + engine.step() + engine.step()

    outputs += engine.run(new_submit("interactive", num_prompt=6, max_tokens=2))

    shares = [share for step in engine.runner.batches for share in step.sequences]
    starts = [share.start for share in shares if share.sequence_id == batch.sequence_id]
    assert engine.load().num_preemptions == 1
    assert starts == [0, 14, 15, 16, 17, 18, 19, 20, 21]
    own = by_sequence(outputs)[batch.sequence_id]
    assert token_ids(own) == token_ids(expected_outputs(batch))
    assert {output.num_cached_tokens for output in own} == {0}


def test_the_end_of_a_prompt_is_forgotten_before_its_beginning() -> None:
    found = []
    for num_other in (8, 12, 16, 20, 24, 28):
        engine = caching_engine(num_blocks=8)
        cached_after(engine, prompted("first", 24))
        engine.run(new_submit("other", prompt_ids=[1] * num_other, max_tokens=1))
        found.append(cached_after(engine, prompted("again", 24)))

    assert found == [20, 20, 16, 12, 8, 4]


def test_the_load_counts_what_was_asked_for_and_what_was_found() -> None:
    engine = caching_engine()
    cached_after(engine, prompted("first", 20))
    cached_after(engine, prompted("second", 22))

    load = engine.load()

    assert (load.num_begun_tokens, load.num_cached_tokens) == (42, 20)
    assert load.num_free_blocks == load.num_blocks


def names_of(submit: Submit) -> list[bytes]:
    pool = BlockPool(num_blocks=64, block_size=BLOCK_SIZE)
    sequence = Sequence(submit, arrival=0)
    cache = SequenceCache(pool, ONE_FULL, max_step_tokens=64, has_prefixes=True)
    cache.begin(sequence)
    sequence.num_computed = sequence.num_tokens
    cache.publish(sequence)
    return sequence.block_names


def test_a_name_stands_for_all_tokens_up_to_its_blocks_end_and_for_the_tenant() -> None:
    submit = prompted("a", 24)
    names = names_of(submit)

    assert names_of(replace(submit, tenant="t")) != names
    for changed in range(24):
        prompt_ids = [*PROMPT[:changed], PROMPT[changed] ^ 1, *PROMPT[changed + 1 :]]
        others = names_of(replace(submit, prompt_ids=prompt_ids))
        num_same = changed // BLOCK_SIZE
        assert others[:num_same] == names[:num_same]
        assert not set(others[num_same:]) & set(names)
