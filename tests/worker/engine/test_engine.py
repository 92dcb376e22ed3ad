from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from shared.errors import ContextLengthExceeded
from tests.support.models.engine import (
    VOCAB_SIZE,
    BreakingRunner,
    DeviceLost,
    SmallEngine,
    by_sequence,
    expected_outputs,
    new_submit,
)
from worker.engine.cache.block_pool import BlockCounts
from worker.engine.engine import Engine
from worker.engine.interface import CancelSequence, EngineLoad, SequenceId, Submit
from worker.engine.scheduler import SchedulerLimits
from worker.model.echo import EchoRunner


def eos_at(submit: Submit, position: int) -> Submit:
    """The same submit, with the token that it draws at ``position`` as an end token."""
    token_id = expected_outputs(submit)[position].token_id
    return replace(submit, eos_ids=frozenset([token_id]))


def test_a_sequence_yields_its_stream() -> None:
    submit = new_submit(max_tokens=12)

    assert SmallEngine().run(submit) == expected_outputs(submit)


def test_sequences_that_join_at_different_steps_yield_what_they_yield_alone() -> None:
    engine = SmallEngine(max_num_batched_tokens=16)
    submits = [new_submit(name, num_prompt=3 + 4 * k) for k, name in enumerate("abcdef")]
    outputs = []

    for submit in submits:
        outputs += engine.step([submit])
    outputs += engine.run()

    assert by_sequence(outputs) == {s.sequence_id: expected_outputs(s) for s in submits}


def test_choices_and_seeds_draw_their_own_tokens() -> None:
    submits = [new_submit(choice=0), new_submit(choice=1), new_submit(choice=2, seed=8)]

    streams = by_sequence(SmallEngine().run(*submits)).values()

    assert len({tuple(output.token_id for output in stream) for stream in streams}) == 3


def test_a_step_is_launched_before_the_one_before_it_is_collected() -> None:
    engine = SmallEngine()

    assert engine.step([new_submit()]) == []
    assert len(engine.step()) == 1

    assert len(engine.runner.batches) == 2
    (decode,) = engine.runner.batches[1].sequences
    assert decode.previous_row == 0


def test_the_step_launched_past_an_eos_is_dropped() -> None:
    submit = eos_at(new_submit(max_tokens=9), position=4)
    engine = SmallEngine()

    outputs = engine.run(submit)

    assert outputs == expected_outputs(submit)
    assert outputs[-1].finish_reason == "stop"
    assert len(engine.runner.batches) == len(outputs) + 1


def test_there_is_work_until_the_last_launched_step_was_collected() -> None:
    engine = SmallEngine()
    engine.step([eos_at(new_submit(), position=0)])

    assert len(engine.step()) == 1
    assert engine.has_work
    assert engine.step() == []
    assert not engine.has_work


def test_the_end_of_one_sequence_leaves_the_rows_of_the_others_right() -> None:
    first = eos_at(new_submit("first"), position=2)
    others = [new_submit(name, max_tokens=9) for name in "ab"]

    streams = by_sequence(SmallEngine().run(first, *others))

    assert streams == {s.sequence_id: expected_outputs(s) for s in (first, *others)}


def test_an_ignored_eos_does_not_end_a_sequence() -> None:
    submit = eos_at(new_submit(max_tokens=9, ignore_eos=True), position=4)

    assert len(SmallEngine().run(submit)) == 9


def test_a_sequence_goes_on_where_another_worker_stopped() -> None:
    whole = expected_outputs(new_submit(max_tokens=10))
    known = [output.token_id for output in whole[:6]]

    rest = SmallEngine().run(new_submit(max_tokens=10, output_ids=known))

    assert rest == whole[6:]


def test_a_cancelled_sequence_yields_nothing_more_and_frees_its_blocks() -> None:
    engine = SmallEngine()
    submit = new_submit(max_tokens=50)
    engine.step([submit])
    engine.step()

    assert engine.step([CancelSequence(submit.sequence_id)]) == []

    assert not engine.has_work
    assert engine.load().num_free_blocks == engine.load().num_blocks


def test_a_waiting_sequence_can_be_cancelled() -> None:
    engine = SmallEngine(max_num_seqs=1)
    running, waiting = (new_submit(name) for name in ("running", "waiting"))
    engine.step([running, waiting])

    outputs = engine.run(CancelSequence(waiting.sequence_id))

    assert outputs == expected_outputs(running)


def test_a_sequence_whose_last_token_is_on_its_way_can_be_cancelled() -> None:
    engine = SmallEngine()
    submit = new_submit(max_tokens=1)
    engine.step([submit])

    assert engine.step([CancelSequence(submit.sequence_id)]) == []
    assert not engine.has_work


def test_a_cancelled_id_can_be_submitted_again_at_once() -> None:
    """The row of the first sequence, which is still in flight, must not reach the second."""
    engine = SmallEngine()
    submit = new_submit(max_tokens=8)
    engine.step([submit])
    outputs = engine.step()
    assert outputs

    assert engine.run(CancelSequence(submit.sequence_id), submit) == expected_outputs(submit)


def test_cancelling_an_unknown_sequence_does_nothing() -> None:
    submit = new_submit()

    outputs = SmallEngine().run(CancelSequence(SequenceId("unknown", 0)), submit)

    assert outputs == expected_outputs(submit)


def test_a_preempted_sequence_may_end_by_the_token_that_was_on_its_way() -> None:
    """Visible only in that the sequence ends exactly once, for every length at which it may end."""
    for position in range(11):
        engine = SmallEngine(num_blocks=6, block_size=4)
        old, young = (new_submit(name, num_prompt=7, max_tokens=12) for name in ("old", "young"))
        young = eos_at(young, position)

        streams = by_sequence(engine.run(old, young))

        assert streams[young.sequence_id] == expected_outputs(young)


@pytest.mark.parametrize(
    ("submit", "message"),
    [
        (new_submit(prompt_ids=[]), "at least one token"),
        (new_submit(prompt_ids=[VOCAB_SIZE]), "outside 0 .. 63"),
        (new_submit(output_ids=[-1]), "outside 0 .. 63"),
        (new_submit(max_tokens=0), "max_tokens is 0"),
        (new_submit(max_tokens=2, output_ids=[1, 2]), "max_tokens is 2 and 2 are there already"),
    ],
    ids=["no prompt", "unknown token", "unknown output", "no tokens", "nothing left"],
)
def test_a_submit_that_is_wrong_in_itself_is_refused(submit: Submit, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SmallEngine().step([submit])


def test_a_second_sequence_of_one_id_is_refused() -> None:
    with pytest.raises(ValueError, match="is already running"):
        SmallEngine().step([new_submit(), new_submit()])


def in_small_pool() -> Engine:
    return SmallEngine(num_blocks=4, block_size=4)


def in_short_context() -> Engine:
    runner = EchoRunner(num_blocks=99, max_seq_len=16)
    return Engine(runner, SchedulerLimits(max_num_seqs=1, max_num_batched_tokens=8))


@pytest.mark.parametrize("new_engine", [in_small_pool, in_short_context])
def test_what_can_never_fit_is_refused(new_engine: Callable[[], Engine]) -> None:
    engine = new_engine()
    assert engine.max_seq_len == 16

    engine.check(new_submit(num_prompt=10, max_tokens=6))
    with pytest.raises(ContextLengthExceeded, match=r"10 tokens .* 7 in the completion .* 16"):
        engine.check(new_submit(num_prompt=10, max_tokens=7))


class CountedIds(list[int]):
    num_scans = 0

    def __iter__(self) -> Iterator[int]:
        self.num_scans += 1
        return super().__iter__()


def test_the_prompt_of_many_choices_is_checked_once() -> None:
    engine, leader = in_small_pool(), new_submit("a")
    one, prompt_ids = CountedIds(leader.prompt_ids), CountedIds(leader.prompt_ids)

    engine.check(replace(leader, prompt_ids=one))
    engine.check(replace(leader, prompt_ids=prompt_ids))
    for choice in range(1, 100):
        sequence_id = SequenceId("a", choice)
        follower = replace(leader, sequence_id=sequence_id, leader=leader.sequence_id)
        engine.check(replace(follower, prompt_ids=prompt_ids))

    assert prompt_ids.num_scans == one.num_scans > 0


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE])
def test_a_follower_is_refused_for_its_own_tokens(token_id: int) -> None:
    engine, leader = in_small_pool(), new_submit("a")

    with pytest.raises(ValueError, match="token id"):
        engine.check(replace(leader, output_ids=(token_id,), leader=leader.sequence_id))


def test_the_load_counts_sequences_and_blocks() -> None:
    engine = SmallEngine(num_blocks=10, block_size=4, max_num_seqs=2)

    engine.step([new_submit(name, num_prompt=5) for name in "abc"])

    assert engine.load() == EngineLoad(
        num_running=2,
        num_waiting=1,
        num_blocks=10,
        num_free_blocks=6,
        num_preemptions=0,
        num_begun_tokens=10,
        num_cached_tokens=0,
        block_counts=BlockCounts(tokens=4, states=0, cached_tokens=0, snapshots=0, empty=6),
    )


def test_what_the_runner_raises_comes_out_of_the_step() -> None:
    engine = Engine(BreakingRunner(num_good_steps=1), SchedulerLimits(8, 64))
    engine.step([new_submit()])

    with pytest.raises(DeviceLost):
        engine.step()
