"""LongRoPE beyond the original context, in whole models whose prompts and answers pass it."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.models.tiny import FAMILIES, write_tiny_model
from tests.worker.model.decoders.test_native_families import (
    STEPS,
    assert_same_logits,
    load,
    stepwise_logits,
)
from tests.worker.model.test_cache_layout import PROMPTS, assert_greedy, serve, start

ORIGINAL_LEN, MAX_LEN = 16, 256
LONG_FACTORS = {"phi3": [2.0, 3.0, 4.5, 6.0], "phimoe": [1.5 * k for k in range(2, 10)]}
CUTS = {
    "in chunks and single tokens": STEPS,
    "at the end of the original context": [(16, 16), (27, 10)],
    "before its last token": [(15, 15), (28, 11)],
    "behind its first token": [(17, 17), (26, 9)],
    "at every token": [(1, 1)] * 26 + [(1, 0)] * 17,
}
"""The numbers of tokens of each prompt per step: 43 and 26 tokens together."""


class PublishedAngles(torch.nn.Module):
    """The rotary positions as Microsoft's code computes them for a sequence that ends at the
    position. transformers gives all positions the factors of the whole sequence, and to PhiMoE
    always the short factors."""

    def __init__(self, rope: dict[str, Any]) -> None:
        """``rope`` has the parameters of the configuration."""
        super().__init__()
        self.rope = rope

    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, [1, num_tokens, rotated_dim]."""
        rows = [self._angles(int(position)) for position in position_ids[0]]
        cosines, sines = (torch.stack(part)[None] for part in zip(*rows, strict=True))
        return cosines.to(hidden.dtype), sines.to(hidden.dtype)

    def _angles(self, position: int) -> tuple[Tensor, Tensor]:
        kind = "short" if position + 1 <= ORIGINAL_LEN else "long"
        factors = torch.tensor(self.rope[f"{kind}_factor"])
        dim = 2 * len(factors)
        base = self.rope["rope_theta"] ** (torch.arange(0, dim, 2) / dim)
        growth = math.log(MAX_LEN / ORIGINAL_LEN) / math.log(ORIGINAL_LEN)
        amplitude = self.rope.get(f"{kind}_mscale", math.sqrt(1 + growth))
        angles = (position / (factors * base)).double().repeat(2)
        return angles.cos() * amplitude, angles.sin() * amplitude


def write_model(directory: Path, family: str) -> Any:
    """A model whose original context is shorter than every prompt and answer together."""
    rope = FAMILIES[family]["rope_parameters"] | {
        "original_max_position_embeddings": ORIGINAL_LEN,
        "long_factor": LONG_FACTORS[family],
    }
    model = write_tiny_model(
        directory,
        family,
        max_position_embeddings=MAX_LEN,
        original_max_position_embeddings=ORIGINAL_LEN,
        rope_parameters=rope,
    )
    model.model.rotary_emb = PublishedAngles(rope)
    return model


@pytest.mark.parametrize("family", LONG_FACTORS)
def test_tokens_beyond_the_original_context_have_the_long_factors(
    tmp_path: Path, family: str
) -> None:
    model = write_model(tmp_path, family)

    assert_same_logits(tmp_path, model)


@pytest.mark.parametrize(
    ("family", "key"),
    [
        *[("phi3", key) for key in ("short_factor", "long_factor")],
        *[("phimoe", key) for key in ("short_factor", "long_factor")],
        *[("phimoe", key) for key in ("short_mscale", "long_mscale")],
    ],
)
def test_a_wrong_factor_is_caught(tmp_path: Path, family: str, key: str) -> None:
    model = write_model(tmp_path, family)
    rope = model.model.rotary_emb.rope
    wrong = (torch.tensor(rope[key]) * 1.01).tolist()
    model.model.rotary_emb = PublishedAngles(rope | {key: wrong})

    with pytest.raises(AssertionError, match="relative error"):
        assert_same_logits(tmp_path, model)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("family", LONG_FACTORS)
def test_bits_do_not_depend_on_where_a_prompt_is_cut(tmp_path: Path, family: str, cut: str) -> None:
    write_model(tmp_path, family)
    decoder = load(tmp_path)

    at_once = stepwise_logits(decoder, [(43, 26)])
    in_parts = stepwise_logits(decoder, CUTS[cut])

    assert all(torch.equal(one, other) for one, other in zip(at_once, in_parts, strict=True))


@pytest.mark.parametrize("family", LONG_FACTORS)
def test_an_answer_passes_the_original_context(tmp_path: Path, family: str) -> None:
    model = write_model(tmp_path, family)
    runner = start(load(tmp_path), num_blocks=400)

    served = serve(runner, PROMPTS, num_turns=2)

    assert len(PROMPTS[0]) < ORIGINAL_LEN < len(PROMPTS[0]) + len(served.token_ids[0])
    assert_greedy(model, served)
