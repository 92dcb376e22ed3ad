"""Draws the next token of every sampled row at once."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.providers import Ops
from worker.model.edits import EditInputs, edit


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """How to draw each row; all tensors but ``filtered_rows`` are [num_sampled]."""

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
    """[num_filtered] int64: the rows that are not greedy and for which top-k, top-p or min-p drops
    tokens; only these pay for that."""


def sample(
    ops: Ops, logits: Tensor, sampling: SamplingInputs | None, edits: EditInputs | None = None
) -> Tensor:
    """Return a token id for each row of ``logits`` [num_sampled, vocab_size]: int64.

    Without ``sampling`` every row is greedy. Edits are written over ``logits``. A row's token
    depends on that row and its own parameters alone.
    """
    if edits is not None:
        logits = edit(ops, logits, edits)
    if sampling is None:
        return ops.most_likely(logits)
    floors = torch.full_like(sampling.temperatures, -torch.inf)
    rows = sampling.filtered_rows
    if rows.numel():
        floors[rows] = ops.filter_floors(
            logits[rows],
            sampling.temperatures[rows],
            sampling.top_ks[rows],
            sampling.top_ps[rows],
            sampling.min_ps[rows],
        )
    return ops.draw_rows(logits, sampling.temperatures, floors, sampling.uniforms)
