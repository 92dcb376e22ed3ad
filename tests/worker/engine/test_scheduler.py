"""The scheduler's decisions, seen from outside: which tokens each step computes."""

import pytest

from shared.errors import StartupError
from tests.support.models.engine import SmallEngine, by_sequence, expected_outputs, new_submit
from worker.engine.interface import Promote, ScheduledBatch, StepOutput
from worker.engine.scheduler import SchedulerLimits


def names(batch: ScheduledBatch) -> list[str]:
    return [share.sequence_id.request_id for share in batch.sequences]


def order_of_ends(outputs: list[StepOutput]) -> list[str]:
    return [o.sequence_id.request_id for o in outputs if o.finish_reason is not None]


def test_a_long_prompt_is_computed_in_chunks_of_the_token_budget() -> None:
    engine = SmallEngine(max_num_batched_tokens=8)

    engine.run(new_submit(num_prompt=20, max_tokens=3))

    assert engine.num_tokens_by_step == [[8], [8], [4], [1], [1]]


def test_decodes_come_before_chunks_and_leave_them_the_rest_of_the_budget() -> None:
    engine = SmallEngine(max_num_batched_tokens=8)
    engine.step([new_submit("decoding", num_prompt=4, max_tokens=9)])

    engine.run(new_submit("long", num_prompt=20, max_tokens=2))

    assert engine.num_tokens_by_step[1:5] == [[1, 7], [1, 7], [1, 6], [1, 1]]


def test_a_long_interactive_prompt_does_not_halt_the_decodes_of_batch_sequences() -> None:
    engine = SmallEngine(max_num_batched_tokens=8)
    engine.step([new_submit("batch", num_prompt=4, max_tokens=9, job_class="batch")])

    engine.run(new_submit("long", num_prompt=20, max_tokens=2))

    assert engine.num_tokens_by_step[1:5] == [[1, 7], [1, 7], [1, 6], [1, 1]]


def test_a_short_prompt_gets_half_of_the_steps_of_a_long_one() -> None:
    engine = SmallEngine(max_num_batched_tokens=8)
    engine.step([new_submit("long", num_prompt=40, max_tokens=1)])

    outputs = engine.run(new_submit("short", num_prompt=7, max_tokens=1))

    assert engine.num_tokens_by_step == [[8], [4, 4], [3, 5], [8], [8], [7]]
    assert order_of_ends(outputs) == ["short", "long"]


def test_a_prompt_that_is_no_shorter_waits_for_the_one_before_it() -> None:
    engine = SmallEngine(max_num_batched_tokens=8)
    engine.step([new_submit("first", num_prompt=20, max_tokens=1)])

    engine.run(new_submit("second", num_prompt=7, max_tokens=1))

    assert engine.num_tokens_by_step == [[8], [8], [4, 4], [3]]


def test_an_interactive_prompt_does_not_wait_for_a_batch_one_however_short() -> None:
    engine = SmallEngine(max_num_batched_tokens=8)
    engine.step([new_submit("batch", num_prompt=20, max_tokens=1, job_class="batch")])

    engine.run(new_submit("interactive", num_prompt=10, max_tokens=1))

    assert engine.num_tokens_by_step == [[8], [4, 4], [4, 4], [2, 4]]


def test_a_batch_prompt_waits_for_an_interactive_one_however_long() -> None:
    engine = SmallEngine(max_num_batched_tokens=8)
    engine.step([new_submit("interactive", num_prompt=20, max_tokens=1)])

    engine.run(new_submit("batch", num_prompt=2, max_tokens=1, job_class="batch"))

    assert engine.num_tokens_by_step == [[8], [8], [4, 2]]


def test_prompts_share_a_step() -> None:
    engine = SmallEngine(max_num_batched_tokens=16)

    engine.run(*(new_submit(name, num_prompt=6, max_tokens=1) for name in "abc"))

    assert engine.num_tokens_by_step == [[6, 6, 4], [2]]


def test_no_more_than_max_num_seqs_run_at_once() -> None:
    engine = SmallEngine(max_num_seqs=2)

    engine.run(*(new_submit(name) for name in "abcde"))

    assert max(len(batch.sequences) for batch in engine.runner.batches) == 2


def test_nothing_is_launched_beyond_max_tokens() -> None:
    engine = SmallEngine()

    engine.run(new_submit(num_prompt=5, max_tokens=4))

    assert engine.num_tokens_by_step == [[5], [1], [1], [1]]


def test_a_place_is_taken_again_in_the_step_after_the_last_token_was_launched() -> None:
    engine = SmallEngine(max_num_seqs=1)

    engine.run(*(new_submit(name, num_prompt=3, max_tokens=2) for name in "ab"))

    assert engine.num_tokens_by_step == [[3], [1], [3], [1]]


def test_when_blocks_run_out_the_youngest_makes_room_and_goes_on_later() -> None:
    engine = SmallEngine(num_blocks=6, block_size=4)
    old, young = (new_submit(name, num_prompt=7, max_tokens=12) for name in ("old", "young"))

    outputs = engine.run(old, young)

    assert engine.load().num_preemptions > 0
    assert order_of_ends(outputs) == ["old", "young"]
    assert by_sequence(outputs)[young.sequence_id] == expected_outputs(young)


def test_a_preempted_sequence_comes_back_before_those_that_came_after_it() -> None:
    engine = SmallEngine(num_blocks=6, block_size=4)
    submits = [new_submit(name, num_prompt=7, max_tokens=12) for name in ("a", "b", "c")]

    outputs = engine.run(*submits)

    assert engine.load().num_preemptions > 0
    assert order_of_ends(outputs) == ["a", "b", "c"]


def test_a_small_sequence_does_not_pass_a_large_one_that_waits_for_blocks() -> None:
    engine = SmallEngine(num_blocks=8, block_size=4)
    engine.step([new_submit("first", num_prompt=14, max_tokens=6)])

    outputs = engine.run(
        new_submit("large", num_prompt=24, max_tokens=2),
        new_submit("small", num_prompt=2, max_tokens=2),
    )

    assert order_of_ends(outputs) == ["first", "large", "small"]


def test_a_sequence_is_not_admitted_into_the_last_blocks_of_others() -> None:
    """Each running sequence can still grow by a block, so the new sequence preempts none at
    once."""
    engine = SmallEngine(num_blocks=6, block_size=4)
    engine.step([new_submit("first", num_prompt=8, max_tokens=9)])

    engine.step([new_submit("second", num_prompt=16, max_tokens=4)])

    assert names(engine.runner.batches[-1]) == ["first"]
    assert engine.load().num_free_blocks == 3


def test_a_sequence_may_fill_the_whole_pool() -> None:
    engine = SmallEngine(num_blocks=4, block_size=4)
    submit = new_submit(num_prompt=9, max_tokens=7)

    assert engine.run(submit) == expected_outputs(submit)


def test_interactive_sequences_are_admitted_before_batch_ones_that_came_earlier() -> None:
    engine = SmallEngine(max_num_seqs=1)

    outputs = engine.run(
        new_submit("batch", job_class="batch"), new_submit("interactive"), max_num_steps=50
    )

    assert order_of_ends(outputs) == ["interactive", "batch"]


def test_batch_sequences_leave_the_reserve_free() -> None:
    engine = SmallEngine(max_num_seqs=4, batch_reserve=1)
    engine.step([new_submit(name, max_tokens=20, job_class="batch") for name in "abcd"])
    assert names(engine.runner.batches[-1]) == ["a", "b", "c"]

    engine.step([new_submit("interactive", max_tokens=20)])

    assert names(engine.runner.batches[-1]) == ["a", "b", "c", "interactive"]
    assert engine.load().num_preemptions == 0


def test_one_batch_sequence_runs_however_large_the_reserve() -> None:
    engine = SmallEngine(max_num_seqs=2, batch_reserve=5)
    submit = new_submit(job_class="batch")

    assert engine.run(submit) == expected_outputs(submit)


def test_a_running_batch_sequence_gives_its_place_to_an_interactive_one() -> None:
    engine = SmallEngine(max_num_seqs=1)
    batch = new_submit("batch", max_tokens=9, job_class="batch")
    outputs = engine.step([batch]) + engine.step()

    outputs += engine.run(new_submit("interactive"))

    assert order_of_ends(outputs) == ["interactive", "batch"]
    assert by_sequence(outputs)[batch.sequence_id] == expected_outputs(batch)


def test_batch_sequences_give_their_blocks_to_an_interactive_one() -> None:
    engine = SmallEngine(num_blocks=8, block_size=4)
    engine.step([new_submit("batch", num_prompt=18, max_tokens=9, job_class="batch")])

    engine.step([new_submit("interactive", num_prompt=18)])

    assert names(engine.runner.batches[-1]) == ["interactive"]


def test_batch_sequences_run_on_where_preempting_them_would_not_help() -> None:
    engine = SmallEngine(num_blocks=10, block_size=4)
    engine.step([new_submit("old", num_prompt=18, max_tokens=9)])
    engine.step([new_submit("batch", num_prompt=4, max_tokens=9, job_class="batch")])

    engine.step([new_submit("large", num_prompt=30)])

    assert names(engine.runner.batches[-1]) == ["old", "batch"]


def test_when_blocks_run_out_batch_makes_room_before_a_younger_interactive_one() -> None:
    engine = SmallEngine(num_blocks=9, block_size=4)
    engine.step([new_submit("batch", num_prompt=7, max_tokens=20, job_class="batch")])
    interactive = [new_submit(name, num_prompt=7, max_tokens=8) for name in ("old", "young")]

    outputs = engine.run(*interactive)

    assert engine.load().num_preemptions == 1
    assert order_of_ends(outputs) == ["old", "young", "batch"]


@pytest.mark.parametrize(("max_num_seqs", "max_num_batched_tokens"), [(0, 8), (9, 8)])
def test_limits_that_contradict_one_another_stop_the_start(
    max_num_seqs: int, max_num_batched_tokens: int
) -> None:
    with pytest.raises(StartupError, match="must be at least"):
        SchedulerLimits(max_num_seqs, max_num_batched_tokens)


def test_a_promoted_sequence_goes_before_interactive_ones_that_came_later() -> None:
    engine = SmallEngine(max_num_seqs=1, max_num_batched_tokens=8)
    engine.step([new_submit("running", num_prompt=2, max_tokens=4)])
    batch = new_submit("batch", num_prompt=2, max_tokens=1, job_class="batch")
    engine.step([batch, new_submit("later", num_prompt=2, max_tokens=1)])

    engine.step([Promote(batch.sequence_id)])
    engine.run()

    begun = [name for b in engine.runner.batches for name in names(b)]
    assert begun.index("batch") < begun.index("later")


def test_a_promoted_sequence_goes_on_from_where_it_is() -> None:
    engine = SmallEngine(max_num_batched_tokens=8)
    batch = new_submit("batch", num_prompt=4, max_tokens=6, job_class="batch")
    outputs = [*engine.step([batch]), *engine.step()]

    outputs += engine.step([Promote(batch.sequence_id)])
    outputs += engine.run()

    token_ids = [output.token_id for output in outputs]
    assert token_ids == [output.token_id for output in expected_outputs(batch)]
    assert sum(share.num_tokens for b in engine.runner.batches for share in b.sequences) == 9
