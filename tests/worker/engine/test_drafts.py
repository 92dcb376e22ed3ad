from itertools import count
from typing import Any

import pytest

from tests.support.models.engine import (
    SmallEngine,
    by_sequence,
    expected_outputs,
    new_submit,
    undrafted,
)
from tests.worker.engine.simulation import Device, serve
from worker.engine.drafts import Drafter
from worker.engine.interface import Submit
from worker.engine.scheduler import SchedulerLimits
from worker.engine.step_cost import StepWork

TEXT = [11, 12, 13, 14, 15, 16, 17, 18, 19]


def test_a_draft_is_what_followed_the_latest_tokens() -> None:
    drafter = Drafter([*TEXT, 1, 2, 12, 13, 14])

    assert drafter.draft(3) == [15, 16, 17]


def test_a_draft_skips_the_tokens_that_are_being_drawn() -> None:
    drafter = Drafter([*TEXT, 12, 13, 14])

    assert drafter.draft(3, num_skipped=1) == [16, 17, 18]


def test_the_longest_match_is_drafted() -> None:
    long, short = [1, 2, 3, 4, 5, 6], [4, 5, 6]
    drafter = Drafter([*long, 7, 7, *short, 8, 8, *long])

    assert drafter.draft(1) == [7]


def test_of_equal_matches_the_last_is_drafted() -> None:
    drafter = Drafter([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3])

    assert drafter.draft(1) == [8]


@pytest.mark.parametrize("token_ids", [[], [5], [1, 2, 3, 4], [1, 2, 9, 1, 2]])
def test_without_a_match_nothing_is_drafted(token_ids: list[int]) -> None:
    assert Drafter(token_ids).draft(4) == []


def test_a_match_begins_at_a_token() -> None:
    # The bytes of these tokens occur in the middle of earlier tokens, too.
    drafter = Drafter([0x0100, 0x0100, 0x0100, 0x0100, 7, 1, 1, 1])

    assert drafter.draft(4) == []


def test_a_draft_goes_on_with_what_repeats_itself() -> None:
    drafter = Drafter([9, 1, 2, 3, 1, 2, 3])

    assert drafter.draft(5, num_skipped=1) == [2, 3, 1, 2, 3]


def test_drafts_become_short_when_they_are_wrong_and_are_tried_again_later() -> None:
    drafter = Drafter(TEXT)
    at_first = drafter.num_worthwhile(0.5)
    for _ in range(10):
        drafter.learn(1, was_right=False)
    when_wrong = drafter.num_worthwhile(0.5)
    for _ in range(100):
        drafter.append(1)

    assert when_wrong == 0
    assert drafter.num_worthwhile(0.5) == at_first > 0


def test_drafts_become_longer_when_they_are_right() -> None:
    drafter = Drafter(TEXT)
    at_first = drafter.num_worthwhile(0.1)
    for _ in range(20):
        drafter.learn(1, was_right=True)

    assert drafter.num_worthwhile(0.1) > 2 * at_first


def repetitive_engine(**limits: Any) -> SmallEngine:
    """An engine whose model has a single token, which repeats itself without end."""
    clock = count(step=0.001).__next__  # steps take the same time, whatever they compute
    return SmallEngine(vocab_size=1, clock=clock, **limits)


def test_right_drafts_save_steps() -> None:
    submit = new_submit(prompt_ids=[0] * 8, max_tokens=60)
    engine = repetitive_engine(max_draft_tokens=5)

    outputs = by_sequence(engine.run(submit))[submit.sequence_id]

    assert undrafted(outputs) == expected_outputs(submit, vocab_size=1)
    assert len(engine.runner.batches) < 30
    load = engine.load()
    assert load.num_drafted_tokens >= load.num_accepted_tokens > 30
    assert sum(output.is_predicted for output in outputs) == load.num_accepted_tokens


def test_nothing_is_drafted_unless_it_is_allowed() -> None:
    engine = repetitive_engine()

    engine.run(new_submit(prompt_ids=[0] * 8, max_tokens=60))

    assert engine.load().num_drafted_tokens == 0


def drafted_before_all_run(engine: SmallEngine, *submits: Submit) -> int:
    """How many tokens are drafted while some of the sequences wait."""
    num_drafted = 0
    engine.step(submits)
    while engine.load().num_waiting:
        num_drafted = engine.load().num_drafted_tokens
        engine.step()
    return num_drafted


def test_tokens_are_drafted_while_others_wait_for_a_slot() -> None:
    engine = repetitive_engine(max_num_seqs=2, max_draft_tokens=5)
    submits = [new_submit(f"s{k}", prompt_ids=[0] * 8, max_tokens=20) for k in range(3)]

    assert drafted_before_all_run(engine, *submits)


def test_nothing_is_drafted_while_others_wait_for_memory() -> None:
    engine = repetitive_engine(num_blocks=10, max_draft_tokens=5)
    first = new_submit("first", prompt_ids=[0] * 8, max_tokens=20)
    long = new_submit("long", prompt_ids=[0] * 36, max_tokens=2)

    assert not drafted_before_all_run(engine, first, long)


def test_nothing_is_drafted_that_takes_longer_than_it_saves() -> None:
    def per_token(work: StepWork) -> float:
        return work.num_prompt_tokens + work.num_decodes

    device = Device(num_blocks=64, step_s=per_token, vocab_size=1)
    limits = SchedulerLimits(8, 64, max_draft_tokens=5)

    engine, _ = serve(device, limits, [new_submit(prompt_ids=[0] * 8, max_tokens=60)], 1)

    assert engine.load().num_drafted_tokens == 0
