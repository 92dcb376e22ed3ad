"""The tokens of an answer, drawn again at once, against the engine that generated them in steps."""

from collections.abc import Sequence
from typing import Any

import pytest

from shared.errors import InvalidRequest
from shared.messages import SamplingParams
from tests.support.models.engine import (
    VOCAB_SIZE,
    RecordingRunner,
    SmallEngine,
    mask_of,
    new_submit,
)
from worker.engine.cache.layout import FullCache, StateCache, WindowCache
from worker.engine.interface import StepOutput, Submit
from worker.engine.redraw import Redrawing

NUM_PROMPT = 9
NUM_TOKENS = 30
PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": -1.25,
}
SUBMITS: dict[str, dict[str, Any]] = {
    "plain": {},
    "edited": {
        "sampling": SamplingParams(logit_bias={3: 2.5, 40: -1.0}, min_tokens=5, **PENALTIES)
    },
    "bad words": {"bad_words": [[5], [7, 8], [1, 2, 3]]},
    "allowed": {"allowed": mask_of(range(0, VOCAB_SIZE, 2))},
    "ended": {"eos_ids": frozenset(range(0, VOCAB_SIZE, 9))},
}


class EvenThenOdd:
    """Allows even tokens, then as many odd tokens, and no more after ``length`` of them."""

    def __init__(self, length: int) -> None:
        self._left = length

    @property
    def is_complete(self) -> bool:
        return not self._left

    def advance(self, token_id: int) -> None:
        if token_id % 2 != self._left % 2:
            raise InvalidRequest("not allowed")
        self._left -= 1

    def mask(self) -> bytes:
        return mask_of(range(self._left % 2, VOCAB_SIZE, 2))

    def forced_tokens(self) -> Sequence[int]:
        return ()

    def masks_after(self, token_ids: Sequence[int]) -> Sequence[bytes]:
        return ()


def submit(**options: Any) -> Submit:
    return new_submit(num_prompt=NUM_PROMPT, max_tokens=NUM_TOKENS, **options)


def generated(asked: Submit) -> list[StepOutput]:
    return SmallEngine().run(asked)


def redrawn(drawing: Redrawing, asked: Submit, token_ids: Sequence[int]) -> list[StepOutput]:
    return [draw.output for draw in drawing.draw(asked, token_ids)]


def redrawing(max_step_tokens: int = 64) -> tuple[Redrawing, RecordingRunner]:
    runner = RecordingRunner(16, 4)
    return Redrawing(runner, max_step_tokens), runner


@pytest.mark.parametrize("max_step_tokens", [1, 4, NUM_PROMPT, 64])
@pytest.mark.parametrize("name", SUBMITS)
def test_the_draws_are_the_tokens_that_the_engine_has_generated(
    name: str, max_step_tokens: int
) -> None:
    expected = generated(submit(**SUBMITS[name]))

    token_ids = [output.token_id for output in expected]
    drawn = redrawn(redrawing(max_step_tokens)[0], submit(**SUBMITS[name]), token_ids)

    assert drawn == expected


def test_a_constraint_ends_the_answer_and_masks_each_draw() -> None:
    expected = generated(submit(constraint=EvenThenOdd(8)))
    token_ids = [output.token_id for output in expected]
    assert len(token_ids) == 8

    drawn = redrawn(redrawing()[0], submit(constraint=EvenThenOdd(8)), token_ids)

    assert drawn == expected
    assert drawn[-1].finish_reason == "stop"


def test_a_token_that_a_constraint_does_not_allow_is_not_drawn() -> None:
    token_ids = [output.token_id for output in generated(submit(constraint=EvenThenOdd(8)))]
    token_ids[3] += 1

    drawn = redrawn(redrawing()[0], submit(constraint=EvenThenOdd(8)), token_ids)

    assert [output.token_id == token_ids[k] for k, output in enumerate(drawn)] == [
        True,
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("place", [0, 1, NUM_TOKENS // 2, NUM_TOKENS - 1])
def test_the_first_token_that_was_changed_is_the_first_that_differs(place: int) -> None:
    token_ids = [output.token_id for output in generated(submit())]
    token_ids[place] = (token_ids[place] + 1) % VOCAB_SIZE

    drawn = [output.token_id for output in redrawn(redrawing()[0], submit(), token_ids)]

    assert drawn[:place] == token_ids[:place]
    assert drawn[place] != token_ids[place]


def test_one_step_draws_all_tokens_and_the_next_choice_finds_its_prompt() -> None:
    first, second = (submit(choice=choice) for choice in range(2))
    answers = [[output.token_id for output in generated(one)] for one in (first, second)]
    drawing, runner = redrawing()

    for asked, token_ids in zip((first, second), answers, strict=True):
        assert [output.token_id for output in redrawn(drawing, asked, token_ids)] == token_ids

    sizes = [batch.num_tokens for batch in runner.batches]
    assert sizes == [NUM_PROMPT + NUM_TOKENS - 1, NUM_TOKENS]


def test_groups_of_tokens_and_of_states_have_blocks_of_their_own() -> None:
    groups = (FullCache(), WindowCache(8), StateCache(2, 8))
    runner = RecordingRunner(30, 4, groups=groups)
    drawing = Redrawing(runner, 16)

    for choice in range(2):
        token_ids = [output.token_id for output in generated(submit(choice=choice))]
        drawn = redrawn(drawing, submit(choice=choice), token_ids)
        assert [output.token_id for output in drawn] == token_ids


def test_an_answer_that_does_not_fit_the_cache_is_refused() -> None:
    drawing = Redrawing(RecordingRunner(2, 4), 64)

    with pytest.raises(ValueError, match="38 tokens do not fit"):
        next(drawing.draw(submit(), [1] * NUM_TOKENS))
