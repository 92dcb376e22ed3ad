"""Every adapter reads every event: as a piece, or as a failure of the engine."""

from contextlib import suppress
from typing import Any

import pytest

from shared.errors import EngineFailed
from shared.messages import SamplingParams
from worker.engines.adapter import Ask, EngineContent, piece_of
from worker.engines.adapters import ADAPTERS
from worker.text import Tokenizer

VALUES: list[Any] = [None, 7, "text", [], [None], ["text"], [[]], {}, {"text": {}}]
FIELDS = [
    *("choices", "token_ids", "logprobs", "token_logprobs", "top_logprobs", "finish_reason"),
    *("tokens", "content", "stop", "stop_type", "tokens_predicted", "completion_probabilities"),
    *("output_ids", "meta_info", "output_token_logprobs", "output_top_logprobs", "text"),
]
EVENTS: list[dict[str, Any]] = [
    {"choices": [{"token_ids": [5], "logprobs": {"tokens": []}}]},
    {"choices": [{"token_ids": [5], "logprobs": {"token_logprobs": [-1.0], "top_logprobs": [7]}}]},
    {"choices": [{"token_ids": [5], "logprobs": {"token_logprobs": 7}}]},
    {"choices": {"text": 1}},
    {"tokens": [5], "tokens_predicted": 1, "stop": True, "stop_type": []},
    {"output_ids": [5], "meta_info": {"finish_reason": "stop", "completion_tokens": 1}},
    *({field: value} for field in FIELDS for value in VALUES),
    *({"choices": [{field: value}]} for field in FIELDS for value in VALUES),
]


@pytest.mark.parametrize("engine", ADAPTERS)
@pytest.mark.parametrize("num_prompt_top", [None, 1])
def test_an_event_is_a_piece_or_a_failure(
    engine: str, num_prompt_top: int | None, tokenizer: Tokenizer
) -> None:
    sampling = SamplingParams(logprobs=1)
    for event in EVENTS:
        ask = Ask([1, 2], 9, sampling, seed=0, num_prompt_top=num_prompt_top)
        with suppress(EngineFailed):
            piece = piece_of(ADAPTERS[engine].call(ask, tokenizer), event)
            assert isinstance(piece, EngineContent), event
