"""The events of choices, without an engine."""

import itertools
from collections.abc import Sequence

import pytest

from bench.echo_worker import echo_model
from shared.log import LogReader, LogWriter
from shared.messages import Finished, PromptScores, SamplingParams, Started, TokenDelta
from shared.settings import WorkerSettings
from tests.support.workers.jobs import new_job
from worker.decode.choices import ChoicePlan, Choices, ChoiceWriter, Vocabulary
from worker.engine.interface import Output, SequenceId, StepOutput, TokenScore
from worker.text import Tokenizer


def test_an_event_divides_its_text_by_tokens(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode_text("naïve 🦊, stop")
    outputs = [StepOutput(SequenceId("r", 0), token_id) for token_id in token_ids]

    def writer() -> ChoiceWriter:
        sampling = SamplingParams(stop=("stops",))
        return ChoiceWriter(
            0, LogWriter(1, 1), tokenizer, sampling, max_tokens=99, eos_ids=frozenset()
        )

    by_token = writer()
    by_one = [by_token.advance([output]) for output in outputs]
    texts = [event.text for event in by_one if event is not None]
    event = writer().advance(outputs)

    assert event is not None
    ends = [*itertools.accumulate(event.num_chars), len(event.text)]
    divided = [event.text[start:end] for start, end in itertools.pairwise([0, *ends])]
    assert divided == texts
    assert "" in texts


def test_the_end_of_a_choice_counts_what_drafts_predicted(tokenizer: Tokenizer) -> None:
    writer = ChoiceWriter(
        0,
        LogWriter(1, 1),
        tokenizer,
        SamplingParams(stop=("b",)),
        max_tokens=9,
        eos_ids=frozenset(),
    )
    tokens = [(tokenizer.encode_text(text), text != "x") for text in "xaaba"]
    outputs = [
        StepOutput(SequenceId("r", 0), token_id, is_predicted=is_predicted)
        for (token_id,), is_predicted in tokens
    ]

    end = writer.advance(outputs)

    assert isinstance(end, Finished)
    assert len(end.token_ids) == 4  # what follows the stop string is dropped
    assert end.num_predicted_tokens == 3


def test_tokens_wait_for_an_event_that_is_due(tokenizer: Tokenizer) -> None:
    sampling = SamplingParams(stop=("d",), logprobs=0)
    log = LogWriter(1, 1)
    writer = ChoiceWriter(0, log, tokenizer, sampling, max_tokens=99, eos_ids=frozenset())
    token_ids = [token_id for text in "abcd" for token_id in tokenizer.encode_text(text)]
    a, b, c, d = (
        [StepOutput(SequenceId("r", 0), token_id, score=TokenScore(-1.0, [], []))]
        for token_id in token_ids
    )

    early = [writer.advance(a, is_due=False), writer.advance(b, is_due=False)]
    event = writer.advance(())
    late = writer.advance(c, is_due=False)
    end = writer.advance(d, is_due=False)

    assert [*early, late] == [None, None, None]
    assert isinstance(event, TokenDelta)
    assert (event.index, event.text, event.num_chars, len(event.logprobs)) == (0, "ab", (1,), 2)
    assert isinstance(end, Finished)
    assert (end.index, end.text, len(end.token_ids), len(end.logprobs)) == (2, "c", 2, 2)
    assert log.is_ended


def advance(sampling: SamplingParams, token_ids: Sequence[int]) -> list[TokenDelta | Finished]:
    """The events for tokens that have arrived at once."""
    job = new_job("echo", sampling=sampling)
    plans = [ChoicePlan([1], 9999, Vocabulary([], None, None))]
    choices = Choices(job, plans, echo_model(WorkerSettings()), LogWriter(1, 1))
    outputs: list[Output] = [StepOutput(SequenceId("r", 0), token_id) for token_id in token_ids]
    events = choices.advance(outputs, lambda _: None)
    return [event for event in events if not isinstance(event, PromptScores)]


def test_tokens_that_have_gathered_are_divided_among_events() -> None:
    token_ids = [k % 1000 + 500 for k in range(3000)]

    events = advance(SamplingParams(), token_ids)

    reader = LogReader("r", 1)
    for event in (Started(worker="w", ticket="t", num_prompt_tokens=(1,)), *events):
        reader.read(event)
    assert [len(event.token_ids) for event in events] == [1024, 1024, 952]
    assert reader.chains[0].token_ids == token_ids


@pytest.mark.parametrize("at", [1000, 2000])
def test_tokens_that_have_gathered_behind_the_end_are_dropped(
    tokenizer: Tokenizer, at: int
) -> None:
    (a,), (b,) = map(tokenizer.encode_text, "ab")

    events = advance(SamplingParams(stop=("b",)), [a] * at + [b] + [a] * 2000)

    kinds = [type(event) for event in events]
    assert (kinds[-1], kinds.count(Finished)) == (Finished, 1)
    assert sum(len(event.token_ids) for event in events) == at + 1
