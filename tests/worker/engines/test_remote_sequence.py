"""The requests of a sequence, and what is taken of their answers."""

from shared.messages import SamplingParams
from worker.engine.interface import SequenceId, StepOutput, Submit
from worker.engines.adapter import Piece
from worker.engines.adapters import ADAPTERS
from worker.engines.remote_sequence import RemoteSequence

END = 9


def new_sequence(sampling: SamplingParams) -> RemoteSequence:
    submit = Submit(
        SequenceId("r", 0), [1, 2], sampling, seed=1, max_tokens=8, eos_ids=frozenset({END})
    )
    return RemoteSequence(submit, ADAPTERS["llama-server"].traits, vocab_size=10, arrival=0)


def test_tokens_beyond_those_of_a_request_are_asked_for_again() -> None:
    sequence = new_sequence(SamplingParams(min_tokens=2))
    first = sequence.next_ask()

    outputs, goes_on = sequence.take(Piece((5, 6, 7)))

    assert (first.max_tokens, first.banned_ids) == (2, (END,))
    assert ([output.token_id for output in outputs if isinstance(output, StepOutput)], goes_on) == (
        [5, 6],
        False,
    )
    assert sequence.next_ask().banned_ids == ()
