"""A sequence whose logits are not finite ends, without an effect on others."""

from collections.abc import Iterable

import pytest

from shared.messages import SamplingParams
from tests.support.models.engine import VOCAB_SIZE, by_sequence, expected_outputs, new_submit
from worker.engine.engine import Engine
from worker.engine.interface import (
    NO_TOKEN,
    Output,
    ScheduledBatch,
    SequenceFailed,
    StepHandle,
    StepScores,
    Submit,
    TokenScore,
)
from worker.engine.scheduler import SchedulerLimits
from worker.model.echo import EchoRunner

ODD = 63
"""A prompt with this token gives NaN."""
NAN = TokenScore(float("nan"), (), ())


class _OddStep:
    """A step some rows of which are not finite."""

    def __init__(self, step: StepHandle, odd_rows: set[int], is_odd: list[bool]) -> None:
        self._step = step
        self._odd_rows = odd_rows
        self._is_odd = is_odd

    def result(self) -> list[int]:
        return [NO_TOKEN if r in self._odd_rows else t for r, t in enumerate(self._step.result())]

    def scores(self) -> StepScores:
        scores = self._step.scores()
        return scores._replace(
            drawn={
                row: NAN if row in self._odd_rows else score for row, score in scores.drawn.items()
            },
            prompts=[
                [NAN, *prompt[1:]] if is_odd else prompt
                for is_odd, prompt in zip(self._is_odd, scores.prompts, strict=True)
            ],
        )


class OddRunner(EchoRunner):
    """Computes NaN for each sequence that has the token `ODD` in the step or before."""

    def __init__(self) -> None:
        super().__init__(num_blocks=64, block_size=4, vocab_size=VOCAB_SIZE, is_thorough=True)
        self.num_tokens = 0

    def launch(self, batch: ScheduledBatch) -> StepHandle:
        self.num_tokens += batch.num_tokens
        step = super().launch(batch)
        odd = {
            share.sequence_id: any(
                (self._slots.read(self._slot(share.block_tables[0], at)) or [None])[0] == ODD
                for at in range(share.start + share.num_tokens - share.num_drafts)
            )
            for share in batch.sequences
        }
        rows = [
            share.sequence_id
            for share in batch.sequences
            if share.is_sampled
            for _ in range(1 + share.num_drafts)
        ]
        return _OddStep(
            step,
            {row for row, sequence_id in enumerate(rows) if odd[sequence_id]},
            [odd[share.sequence_id] for share in batch.sequences if share.scored_ids],
        )


def run(engine: Engine, submits: Iterable[Submit]) -> tuple[list[Output], list[SequenceFailed]]:
    outputs, failed = [*engine.step(submits)], engine.take_failed()
    while engine.has_work:
        outputs += engine.step()
        failed += engine.take_failed()
        engine.check_invariants()
    return outputs, failed


def new_engine(max_draft_tokens: int = 0) -> Engine:
    limits = SchedulerLimits(
        max_num_seqs=6,
        max_num_batched_tokens=24,
        prefix_cache=True,
        max_draft_tokens=max_draft_tokens,
    )
    return Engine(OddRunner(), limits)


def odd_submit(name: str) -> Submit:
    return new_submit(name, prompt_ids=[1, 2, ODD, *range(3, 12)], max_tokens=4)


@pytest.mark.parametrize("max_draft_tokens", [0, 4])
def test_the_others_yield_what_they_would_have_yielded(max_draft_tokens: int) -> None:
    engine = new_engine(max_draft_tokens)
    good = [new_submit(f"good {k}", num_prompt=3 + 5 * k, max_tokens=9) for k in range(3)]
    odd = [new_submit("odd", prompt_ids=[5, ODD, 6], max_tokens=9), odd_submit("odd, too")]

    outputs, failed = run(engine, [good[0], *odd, *good[1:]])

    streams = by_sequence(outputs)
    ended = {one.sequence_id for one in failed}
    assert ended >= {submit.sequence_id for submit in odd}
    for submit in good:
        expected = [output.token_id for output in expected_outputs(submit)]
        # A drawn token may be the odd token.
        until = expected.index(ODD) + 1 if ODD in expected else len(expected)
        got = [output.token_id for output in streams[submit.sequence_id]]
        assert got == expected[:until]
    assert engine.load().num_free_blocks == 64


def test_the_error_says_what_the_model_did() -> None:
    _, (failed,) = run(new_engine(), [odd_submit("odd")])
    assert (failed.error.code, failed.error.message) == (
        "not_finite",
        "The model computed NaN or infinite numbers.",
    )


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a_prompt_whose_scores_are_not_finite_fails(max_tokens: int) -> None:
    submit = new_submit(
        "odd",
        prompt_ids=[1, ODD, 2, 3],
        max_tokens=max_tokens,
        scores_prompt=True,
        sampling=SamplingParams(prompt_logprobs=0),
    )
    outputs, (failed,) = run(new_engine(), [submit])
    assert (outputs, failed.error.code) == ([], "not_finite")


def test_its_keys_and_values_are_not_used_again() -> None:
    """They may be NaN because of a fault that does not recur."""
    engine = new_engine()
    run(engine, [odd_submit("first")])
    before = engine.load().num_cached_tokens

    run(engine, [odd_submit("second")])

    assert engine.load().num_cached_tokens == before


def test_a_sound_prompt_is_found_again() -> None:
    engine = new_engine()
    submits = [new_submit(name, prompt_ids=[*range(12)], max_tokens=2) for name in "ab"]
    run(engine, submits[:1])
    run(engine, submits[1:])
    assert engine.load().num_cached_tokens == 8
