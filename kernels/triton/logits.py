"""The output projection: hidden states to logits, summed and returned in float32."""

import torch
from torch import Tensor

from kernels.shapes import check_shape
from kernels.triton.projection import fixed_tiles
from kernels.triton.vector_projection import can_project_vector, project_vector


def logits(hidden: Tensor, weight: Tensor, *, is_batch_invariant: bool = False) -> Tensor:
    """See `kernels.reference.logits`; no logit is rounded to a lower precision.

    cuBLAS computes them, except for a single row; with batch invariance see
    `kernels.triton.projection`.
    """
    check_shape("weight", weight, (None, hidden.shape[-1]))
    if is_batch_invariant or hidden.device.type != "cuda":
        return fixed_tiles(hidden, weight, None, torch.float32)
    if can_project_vector(hidden, weight):
        return project_vector(hidden, weight, None, torch.float32)
    if hidden.dtype == torch.float32:
        return hidden @ weight.t()
    return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
