"""Several sequences with the same prompt, which is computed once."""

from dataclasses import replace

import pytest

from tests.support.models.engine import SmallEngine, by_sequence, expected_outputs, new_submit
from worker.engine.interface import CancelSequence, Submit


def choices(count: int, num_prompt: int = 22) -> list[Submit]:
    leader = new_submit("a", num_prompt)
    followers = [
        replace(new_submit("a", num_prompt, choice=k), leader=leader.sequence_id)
        for k in range(1, count)
    ]
    return [leader, *followers]


def num_computed(engine: SmallEngine) -> int:
    return sum(map(sum, engine.num_tokens_by_step))


@pytest.mark.parametrize("max_num_batched_tokens", [9, 64])
def test_a_prompt_is_computed_once_however_it_is_cut(max_num_batched_tokens: int) -> None:
    engine = SmallEngine(max_num_batched_tokens=max_num_batched_tokens, prefix_cache=True)
    submits = choices(4)

    streams = by_sequence(engine.run(*submits))

    tokens = {key: [output.token_id for output in streams[key]] for key in streams}
    assert tokens == {
        s.sequence_id: [output.token_id for output in expected_outputs(s)] for s in submits
    }
    # The followers compute the tokens that do not fill a block, and their own tokens.
    assert num_computed(engine) == 22 + 3 * 2 + 4 * 5
    assert [streams[s.sequence_id][0].num_cached_tokens for s in submits] == [0, 20, 20, 20]


def test_followers_begin_when_their_leader_has_computed_its_prompt() -> None:
    engine = SmallEngine(max_num_batched_tokens=9, prefix_cache=True)
    engine.step(choices(3))

    assert engine.load().num_waiting == 2
    engine.run()
    begun = [{share.sequence_id.choice for share in b.sequences} for b in engine.runner.batches]
    assert begun[:3] == [{0}, {0}, {0}]
    assert {1, 2} <= begun[3]


def test_followers_of_a_cancelled_leader_begin_all_the_same() -> None:
    engine = SmallEngine(max_num_batched_tokens=9, prefix_cache=True)
    leader, *followers = choices(3)
    engine.step([leader, *followers])

    streams = by_sequence(engine.run(CancelSequence(leader.sequence_id)))

    assert sorted(key.choice for key in streams) == [1, 2]


def test_a_follower_can_be_cancelled_while_it_is_held() -> None:
    engine = SmallEngine(max_num_batched_tokens=9, prefix_cache=True)
    leader, first, second = choices(3)
    engine.step([leader, first, second])

    streams = by_sequence(engine.run(CancelSequence(first.sequence_id)))

    assert sorted(key.choice for key in streams) == [0, 2]
    assert engine.load().num_free_blocks == engine.load().num_blocks


def test_a_leader_that_is_gone_is_not_waited_for() -> None:
    engine = SmallEngine()
    _, follower = choices(2)

    assert engine.run(follower) == expected_outputs(follower)
