"""The angles of rotary position embeddings, scaled according to a model's configuration."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shared.errors import StartupError


def rope_table(rope: dict[str, Any], head_dim: int, num_positions: int) -> Tensor:
    """Cosines, then sines, of each position's angles: [num_positions, head_dim] float32.

    Raises `StartupError` for an unsupported scaling or a missing parameter.
    """
    rope_type = rope["rope_type"]
    if rope_type not in _SCALINGS:
        raise StartupError(f"rope scaling {rope_type!r} is not supported")
    # What is not exact is computed in float64 and rounded, because its float32 forms differ from
    # processor to processor.
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    powers = (rope["rope_theta"] ** exponents).float()
    try:
        frequencies, amplitude = _SCALINGS[rope_type](1 / powers, rope)
    except KeyError as error:
        raise StartupError(f"rope scaling {rope_type!r} needs {error} in config.json") from None
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    exact = angles.double()
    return amplitude * torch.cat((exact.cos(), exact.sin()), dim=-1).float()


def _default(frequencies: Tensor, rope: dict[str, Any]) -> tuple[Tensor, float]:
    return frequencies, 1.0


def _linear(frequencies: Tensor, rope: dict[str, Any]) -> tuple[Tensor, float]:
    return frequencies / rope["factor"], 1.0


def _llama3(frequencies: Tensor, rope: dict[str, Any]) -> tuple[Tensor, float]:
    """Scale low frequencies, keep high ones, and interpolate between them (Llama 3.1)."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * frequencies + (1 - kept) * (frequencies / rope["factor"]), 1.0


def _yarn(frequencies: Tensor, rope: dict[str, Any]) -> tuple[Tensor, float]:
    """Like `_llama3`, but interpolated over dimensions (Peng et al., arXiv:2309.00071)."""
    num_angles = len(frequencies)

    def dimension(num_turns: float) -> float:
        """The dimension whose angle makes ``num_turns`` rotations over the original context."""
        context_len = rope["original_max_position_embeddings"]
        turns = context_len / (num_turns * 2 * math.pi)
        return num_angles * math.log(turns) / math.log(rope["rope_theta"])

    low = dimension(rope.get("beta_fast") or 32)
    high = dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num_angles - 1)
    ramp = (torch.arange(num_angles) - low) / max(high - low, 0.001)
    kept = 1 - ramp.clamp(0, 1)
    scaled = kept * frequencies + (1 - kept) * (frequencies / rope["factor"])
    return scaled, _yarn_amplitude(rope)


def _yarn_amplitude(rope: dict[str, Any]) -> float:
    def amplitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return amplitude(rope["mscale"]) / amplitude(rope["mscale_all_dim"])
    return amplitude(1.0)


_SCALINGS: dict[str, Callable[[Tensor, dict[str, Any]], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
