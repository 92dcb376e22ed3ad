"""A step for which the device has no memory ends a sequence, without an effect on others."""

import random

import pytest

from tests.support.models.engine import VOCAB_SIZE, by_sequence, expected_outputs, new_submit
from worker.engine.engine import Engine
from worker.engine.interface import (
    CancelSequence,
    Output,
    ScheduledBatch,
    SequenceFailed,
    StepFailed,
    StepHandle,
    StepScores,
    Submit,
)
from worker.engine.scheduler import SchedulerLimits
from worker.model.echo import EchoRunner


class _FailedStep:
    def result(self) -> list[int]:
        raise StepFailed

    def scores(self) -> StepScores:
        raise StepFailed


class ScarceRunner(EchoRunner):
    """Fails at some steps, and at each step that continues a failed step, whose slots are empty."""

    def __init__(self, failing: set[int], num_blocks: int) -> None:
        super().__init__(
            num_blocks=num_blocks, block_size=4, vocab_size=VOCAB_SIZE, is_thorough=True
        )
        self._failing = failing
        self._num_launched = 0
        self._has_failed = False

    def launch(self, batch: ScheduledBatch) -> StepHandle:
        self._num_launched += 1
        goes_on = any(share.previous_row is not None for share in batch.sequences)
        self._has_failed = self._num_launched in self._failing or (self._has_failed and goes_on)
        if not self._has_failed:
            try:
                return super().launch(batch)
            except ValueError:
                # A prompt continues after a chunk that failed.
                self._has_failed = True
        for share in batch.sequences:
            for at in range(share.start, share.start + share.num_tokens):
                self._slots.clear(self._slot(share.block_tables[0], at))
        return _FailedStep()


def run(
    submits: list[Submit], failing: set[int], *, num_blocks: int = 64
) -> tuple[list[Output], list[SequenceFailed]]:
    limits = SchedulerLimits(max_num_seqs=6, max_num_batched_tokens=24)
    engine = Engine(ScarceRunner(failing, num_blocks), limits)
    outputs, failed = [*engine.step(submits)], engine.take_failed()
    for _ in range(1000):
        if not engine.has_work:
            assert engine.load().num_free_blocks == num_blocks
            return outputs, failed
        outputs += engine.step()
        failed += engine.take_failed()
        engine.check_invariants()
    raise AssertionError("still at work after 1000 steps")


@pytest.mark.parametrize("seed", range(40))
def test_every_other_sequence_yields_what_it_would_have_yielded(seed: int) -> None:
    draw = random.Random(seed)
    submits = [
        new_submit(
            "shared prefix" if k % 2 else f"own {k}",
            num_prompt=draw.randint(1, 40),
            max_tokens=draw.randint(1, 12),
            choice=k,
        )
        for k in range(10)
    ]
    failing = set(draw.sample(range(1, 9), draw.randint(1, 5)))

    outputs, failed = run(submits, failing, num_blocks=draw.choice([14, 64]))

    streams = by_sequence(outputs)
    ended = {one.sequence_id for one in failed}
    assert 1 <= len(ended) == len(failed) <= len(failing)
    for submit in submits:
        got = [one.token_id for one in streams.get(submit.sequence_id, [])]
        expected = [one.token_id for one in expected_outputs(submit)]
        assert got == (expected[: len(got)] if submit.sequence_id in ended else expected)


def test_the_longest_chunk_of_the_step_ends_and_says_why() -> None:
    submits = [new_submit("short", 3), new_submit("long", 9), new_submit("middle", 6)]
    _, (failed,) = run(submits, {1})
    assert failed.sequence_id == submits[1].sequence_id
    assert (failed.error.code, failed.error.message) == (
        "out_of_memory",
        "The worker does not have enough memory for this request at present.",
    )


def test_of_equally_long_ones_the_last_that_came_ends() -> None:
    submits = [new_submit(name, 5) for name in "abc"]
    _, (failed,) = run(submits, {3})
    assert failed.sequence_id == submits[-1].sequence_id


def test_a_step_whose_only_sequence_was_cancelled_ends_nobody() -> None:
    engine = Engine(ScarceRunner({1}, 8), SchedulerLimits(2, 24))
    submit = new_submit("a", 5)
    engine.step([submit])
    assert engine.step([CancelSequence(submit.sequence_id)]) == []
    assert (engine.take_failed(), engine.has_work) == ([], False)
