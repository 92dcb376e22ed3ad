"""Draws the next token of all sampled rows at once.

The random numbers are counter-based: each depends only on the position for which it is used.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.providers import Ops
from worker.model.sampling.logits_processor import EditInputs, edit

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """The sampling parameters of each row; all tensors except ``filtered_rows`` are
    [num_sampled]."""

    temperatures: Tensor
    """float32; 0 is greedy."""
    top_ks: Tensor
    """int64; 0 keeps all tokens."""
    top_ps: Tensor
    """float32; 1 keeps all tokens."""
    min_ps: Tensor
    """float32; 0 keeps all tokens."""
    uniforms: Tensor
    """float32, multiples of 2**-24 in [0, 1)."""
    filtered_rows: Tensor
    """[num_filtered] int64: the rows that are not greedy and are filtered by top-k, top-p or min-p;
    only these incur its cost."""


def sample(
    ops: Ops, logits: Tensor, sampling: SamplingInputs | None, edits: EditInputs | None = None
) -> Tensor:
    """Return a token id for each row of ``logits`` [num_sampled, vocab_size]: int64.

    Without ``sampling`` every row is greedy. Edits are applied to ``logits`` in place. A row's
    token depends only on that row and its own parameters.
    """
    if edits is not None:
        logits = edit(ops, logits, edits)
    if sampling is None:
        return ops.most_likely(logits)
    floors = floors_of(ops, logits, sampling)
    return ops.draw_rows(logits, sampling.temperatures, floors, sampling.uniforms)


def floors_of(ops: Ops, logits: Tensor, sampling: SamplingInputs) -> Tensor:
    """The lowest logit that may be drawn of each row of the edited ``logits``, [num_sampled]
    float32; -infinity for the rows without filters."""
    floors = torch.full_like(sampling.temperatures, -torch.inf)
    rows = sampling.filtered_rows
    if rows.numel():
        params = (sampling.temperatures, sampling.top_ks, sampling.top_ps, sampling.min_ps)
        filtered = logits if rows.numel() == len(logits) else logits[rows]  # a copy of megabytes
        floors[rows] = ops.filter_floors(filtered, *(param[rows] for param in params))
    return floors


def uniform(seed: int, choice: int, position: int) -> float:
    """Return the number in [0, 1) that determines token ``position`` of a choice.

    A multiple of 2**-24, so that float32 holds it exactly. ``seed`` is unsigned, 64 bits.
    """
    state = 0
    for word in (seed, choice, position):
        state = _mix(state ^ word)
    return (state >> 40) * 2.0**-24


def _mix(state: int) -> int:
    """A step of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): a bijection of 64 bits."""
    state = (state + _GAMMA) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)
