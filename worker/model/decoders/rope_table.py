"""The angles of rotary position embeddings, scaled according to a model's configuration."""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from shared.errors import StartupError
from worker.model.spec import Rope

Parameters: TypeAlias = Mapping[str, Any]

_CHUNK = 512
"""Positions computed at a time, in memory that the processor's cache holds: the system would clear
new memory for the intermediate results of a long context, which takes longer than the angles."""


def rope_table(rope: Rope | None, head_dim: int, num_positions: int) -> Tensor:
    """Cosines, then sines, of each position's angles: [num_positions, head_dim] float32.

    The angles of elements that are not rotated are zero; see `worker.model.weights.rotation` for
    the order of the elements. Raises `StartupError` for an unsupported scaling or a missing
    parameter.
    """
    table = torch.empty(num_positions, head_dim)
    if rope is None:
        table[:, : head_dim // 2], table[:, head_dim // 2 :] = 1, 0
        return table
    parameters, rope_type = rope.parameters, rope.parameters["rope_type"]
    if rope_type not in _SCALINGS:
        raise StartupError(f"rope scaling {rope_type!r} is not supported")
    # Inexact values are computed in float64 and rounded, because their float32 forms differ from
    # processor to processor.
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float64) / rope.dim
    powers = (parameters["rope_theta"] ** exponents).float()
    try:
        frequencies, amplitude = _SCALINGS[rope_type](1 / powers, parameters)
        far_from, far_frequencies, far_amplitude = num_positions, frequencies, amplitude
        if rope_type == "longrope":
            far_from = parameters["original_max_position_embeddings"]
            far_frequencies = _far_frequencies(1 / powers, parameters)
            far_amplitude = _longrope_amplitude(parameters, "long_mscale")
    except KeyError as error:
        raise StartupError(f"rope scaling {rope_type!r} needs {error} in config.json") from None
    _fill(table[:far_from], 0, frequencies, amplitude)
    _fill(table[far_from:], far_from, far_frequencies, far_amplitude)
    return table


def _fill(table: Tensor, first: int, frequencies: Tensor, amplitude: float) -> None:
    """Write the cosines and sines of the positions from ``first`` on, [positions, head_dim]."""
    half, num_angles = table.shape[1] // 2, len(frequencies)
    for start in range(0, len(table), _CHUNK):
        rows = table[start : start + _CHUNK]
        positions = torch.arange(first + start, first + start + len(rows), dtype=torch.float32)
        angles = torch.outer(positions, frequencies)
        exact = functional.pad(angles.double(), (0, half - num_angles))
        torch.mul(exact.cos().float(), amplitude, out=rows[:, :half])
        torch.mul(exact.sin().float(), amplitude, out=rows[:, half:])
    table[:, num_angles:half] = 1  # an amplitude belongs to the rotated elements alone


def _default(frequencies: Tensor, rope: Parameters) -> tuple[Tensor, float]:
    return frequencies, 1.0


def _linear(frequencies: Tensor, rope: Parameters) -> tuple[Tensor, float]:
    return frequencies / rope["factor"], 1.0


def _llama3(frequencies: Tensor, rope: Parameters) -> tuple[Tensor, float]:
    """Scale low frequencies, keep high frequencies, and interpolate between them (Llama 3.1)."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * frequencies + (1 - kept) * (frequencies / rope["factor"]), 1.0


def _yarn(frequencies: Tensor, rope: Parameters) -> tuple[Tensor, float]:
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


def _yarn_amplitude(rope: Parameters) -> float:
    def amplitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return amplitude(rope["mscale"]) / amplitude(rope["mscale_all_dim"])
    return amplitude(1.0)


def _proportional(frequencies: Tensor, rope: Parameters) -> tuple[Tensor, float]:
    """Only the first angles rotate, with the frequencies of a whole head (Gemma 4)."""
    kept = int((rope.get("partial_rotary_factor") or 1.0) * len(frequencies))
    scaled = frequencies / rope.get("factor", 1.0)
    scaled[kept:] = 0
    return scaled, 1.0


def _longrope(frequencies: Tensor, rope: Parameters) -> tuple[Tensor, float]:
    """Each frequency has a factor, within the original context (Ding et al., arXiv:2402.13753)."""
    scaled = frequencies / _factors(frequencies, rope, "short_factor")
    return scaled, _longrope_amplitude(rope, "short_mscale")


def _far_frequencies(frequencies: Tensor, rope: Parameters) -> Tensor:
    """The frequencies of LongRoPE at positions beyond the original context.

    They follow a token's own position and not the length of its sequence, so that no cached key
    depends on the tokens after it.
    """
    return frequencies / _factors(frequencies, rope, "long_factor")


def _factors(frequencies: Tensor, rope: Parameters, name: str) -> Tensor:
    factors = torch.tensor(rope[name], dtype=torch.float32)
    if factors.shape != frequencies.shape:
        raise StartupError(f"{name} has {len(factors)} numbers for {len(frequencies)} frequencies")
    return factors


def _longrope_amplitude(rope: Parameters, key: str) -> float:
    """``key`` names the amplitude within or beyond the original context, where they are stated."""
    if rope.get(key) is not None:
        return float(rope[key])
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    original = rope["original_max_position_embeddings"]
    factor = rope.get("factor") or rope["max_position_embeddings"] / original
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


_SCALINGS: dict[str, Callable[[Tensor, Parameters], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}
