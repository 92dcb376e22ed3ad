"""The events of one choice."""

import itertools

from shared.log import LogWriter
from shared.messages import SamplingParams
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
