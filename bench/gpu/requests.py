"""The requests that all systems get: random token ids, mixed lengths."""

from dataclasses import dataclass

import numpy as np

from bench.gpu.scale import Scale

_SPREAD = 0.6
"""The standard deviation of the logarithm of a length."""


@dataclass(frozen=True)
class GpuRequest:
    prompt_ids: list[int]
    num_outputs: int


def mixed(scale: Scale, seed: int = 0) -> list[GpuRequest]:
    """Requests with log-normal lengths of the scale's means, between 1 and four times the mean."""
    draw = np.random.default_rng(seed)

    def lengths(mean: int) -> list[int]:
        drawn = draw.lognormal(np.log(mean) - _SPREAD**2 / 2, _SPREAD, scale.num_requests)
        return [int(n) for n in drawn.round().clip(1, 4 * mean)]

    return [
        GpuRequest(draw.integers(1, scale.model.vocab_size, num_prompt).tolist(), num_outputs)
        for num_prompt, num_outputs in zip(
            lengths(scale.mean_prompt_len), lengths(scale.mean_output_len), strict=True
        )
    ]
