"""A layer that predicts the token behind the next computes what the paper says, whatever the
step."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.models.batches import batch, share
from tests.support.models.numerics import assert_close, poisoned
from tests.support.models.predictors import PREDICTING, write_predicting_model
from tests.worker.model.decoders.test_native_families import (
    BLOCK_SIZE,
    BLOCKS,
    MAX_RELATIVE_ERROR,
    PROMPTS,
    STEPS,
    load,
    state_blocks,
)
from worker.model.forward import Decoder
from worker.model.inputs import build_inputs
from worker.model.kv_cache import KVCache

CPU = torch.device("cpu")
NEXT_IDS = (17, 29)
"""The token behind each prompt."""


def predictions(decoder: Decoder, steps: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """The logits after each token of each prompt, [num_tokens, vocab_size], over a cache that
    initially contains NaN."""
    layout = decoder.cache_layout(BLOCK_SIZE)
    num_blocks = 10 + 4 * (layout.state.num_blocks if layout.state is not None else 0)
    shape = (layout.num_places, num_blocks, BLOCK_SIZE, decoder.num_kv_heads, decoder.head_dim)
    cache = KVCache(poisoned(*shape), poisoned(*shape), layout)
    computed: list[list[Tensor]] = [[] for _ in PROMPTS]
    for step in steps:
        shares = {}
        for row, count in enumerate(step):
            start = sum(map(len, computed[row]))
            if count:
                tokens = PROMPTS[row][start : start + count]
                states = state_blocks(layout, row, len(computed[row]))
                shares[row] = share(tokens, BLOCKS[row], start=start, states=states)
        inputs = build_inputs(batch(*shares.values()), BLOCK_SIZE, CPU, layout).forward
        order = sorted(shares, key=lambda row: shares[row].num_tokens > 1)
        following = [
            [*PROMPTS[row], NEXT_IDS[row]][one.start + 1 : one.start + 1 + one.num_tokens]
            for row, one in ((row, shares[row]) for row in order)
        ]
        with torch.inference_mode():
            decoder.forward(inputs, cache)
            next_ids = torch.tensor([token_id for part in following for token_id in part])
            logits = decoder.predict(
                replace(inputs, token_ids=next_ids, sampled_rows=torch.arange(len(next_ids))), cache
            ).clone()
        parts = torch.split(logits, [shares[row].num_tokens for row in order])
        for row, part in zip(order, parts, strict=True):
            computed[row].append(part)
    return [torch.cat(parts) for parts in computed]


@pytest.mark.parametrize("family", PREDICTING)
def test_a_prediction_is_what_the_paper_says(tmp_path: Path, family: str) -> None:
    right = write_predicting_model(tmp_path, family).double()

    predicted = predictions(load(tmp_path), STEPS)

    for logits, prompt, next_id in zip(predicted, PROMPTS, NEXT_IDS, strict=True):
        assert_close(logits, right.predicted(prompt, next_id), MAX_RELATIVE_ERROR)
