"""The most likely tokens of each row without sorting it, and its total."""

import torch
from torch import Tensor

from kernels.native.library import Library, library, pointer


def rank_logits(logits: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels.reference.rank_logits`. Of equal logits the lower token comes first."""
    return ranked_by(library(), logits, depth)


def ranked_by(native: Library, logits: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """`rank_logits` of a given library, which may be built for another processor."""
    logits = logits.float().contiguous()
    totals = torch.empty(len(logits))
    values, tokens = torch.empty(len(logits), depth), torch.empty(len(logits), depth).long()
    native.functions.warren_rank_logits(
        native.team(),
        pointer(logits),
        *logits.shape,
        depth,
        pointer(totals),
        pointer(values),
        pointer(tokens),
    )
    return totals, values, tokens
