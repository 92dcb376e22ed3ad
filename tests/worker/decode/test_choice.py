"""The events of one choice."""

import itertools

from shared.log import LogWriter
from shared.messages import Finished, SamplingParams
from worker.decode.choices import ChoiceWriter
from worker.engine.interface import SequenceId, StepOutput
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
    texts = [by_token.advance([output]).text for output in outputs]
    event = writer().advance(outputs)

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
