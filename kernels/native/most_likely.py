"""Finds the most likely token of each row."""

import torch
from torch import Tensor

from kernels.native.library import Library, library, pointer


def most_likely(logits: Tensor) -> Tensor:
    """See `kernels.reference.most_likely`. Returns the first token of a tie."""
    return found_by(library(), logits)


def found_by(native: Library, logits: Tensor) -> Tensor:
    """`most_likely` of a given library, which may be built for another processor."""
    logits = logits.float().contiguous()
    tokens = torch.empty(len(logits), dtype=torch.int64)
    native.functions.warren_most_likely(
        native.team(), pointer(logits), *logits.shape, pointer(tokens)
    )
    return tokens
