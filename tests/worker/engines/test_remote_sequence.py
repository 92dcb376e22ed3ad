"""The requests of a sequence, and what is taken of their answers."""

from typing import Any

import pytest

from shared.errors import EngineFailed
from shared.messages import Constraint, SamplingParams
from worker.engine.interface import SequenceId, StepOutput, Submit, TokenScore
from worker.engines.adapter import EngineContent
from worker.engines.adapters import ADAPTERS
from worker.engines.remote_sequence import RemoteSequence

END = 9


def new_sequence(sampling: SamplingParams, **fields: Any) -> RemoteSequence:
    known: dict[str, Any] = {"seed": 1, "max_tokens": 8, "eos_ids": frozenset({END}), **fields}
    submit = Submit(SequenceId("r", 0), [1, 2], sampling, **known)
    return RemoteSequence(submit, ADAPTERS["llama-server"].traits, vocab_size=10, arrival=0)


def test_tokens_beyond_those_of_a_request_are_asked_for_again() -> None:
    sequence = new_sequence(SamplingParams(min_tokens=2))
    first = sequence.next_ask()

    outputs, goes_on = sequence.take(EngineContent((5, 6, 7)))

    assert (first.max_tokens, first.banned_ids) == (2, (END,))
    assert ([output.token_id for output in outputs if isinstance(output, StepOutput)], goes_on) == (
        [5, 6],
        False,
    )
    assert sequence.next_ask().banned_ids == ()


def test_a_constraint_is_sent_again_with_a_request_that_the_engine_did_not_begin() -> None:
    constraint = Constraint(kind="json_schema", source="{}")
    sequence = new_sequence(SamplingParams(constraint=constraint))

    asks = [sequence.next_ask() for _ in range(2)]

    assert [ask.constraint for ask in asks] == [constraint, constraint]


def test_a_constraint_is_not_sent_again_once_the_output_has_begun() -> None:
    constraint = Constraint(kind="json_schema", source="{}")
    sequence = new_sequence(SamplingParams(constraint=constraint))
    sequence.next_ask()

    sequence.take(EngineContent((5,)))

    assert not sequence.withdraw_constraint()
    assert sequence.next_ask().constraint is None


def test_the_prompt_of_a_batch_is_scored_with_the_priority_of_a_batch() -> None:
    sequence = new_sequence(
        SamplingParams(prompt_logprobs=1), scores_prompt=True, job_class="batch"
    )

    assert sequence.next_ask().is_batch


@pytest.mark.parametrize(
    "piece",
    [
        EngineContent((END + 1,)),
        EngineContent(("5",)),  # type: ignore[arg-type]  # as an engine may answer
        EngineContent((5, 6), scores=(TokenScore(-1.0, [], []),)),
        EngineContent((5,), scores=(TokenScore(None, [], []),)),  # type: ignore[arg-type]
        EngineContent((5,), scores=(TokenScore(-1.0, [END + 1], [-1.0]),)),
    ],
    ids=["beyond", "text", "too few scores", "no score", "unknown alternative"],
)
def test_tokens_and_scores_that_make_no_sense_are_failures_of_the_engine(
    piece: EngineContent,
) -> None:
    sequence = new_sequence(SamplingParams(logprobs=1))
    sequence.next_ask()

    with pytest.raises(EngineFailed):
        sequence.take(piece)
