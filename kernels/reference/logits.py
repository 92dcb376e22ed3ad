"""The output projection: hidden states to logits."""

import torch
from torch import Tensor
from torch.nn import functional

from kernels.shapes import check_shape

_NUM_EXACT = 16


def logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return ``hidden @ weight.T`` in float32: [num_rows, vocab_size].

    ``hidden`` is [num_rows, width], ``weight`` [vocab_size, width] of the same dtype. The highest
    16 logits of each row are not rounded to that dtype: bfloat16 numbers near 25 are 0.125 apart,
    so the most likely tokens would often tie and the lowest id would win. Raises `ValueError` if
    the widths differ.
    """
    check_shape("weight", weight, (None, hidden.shape[-1]))
    rounded = functional.linear(hidden, weight).float()
    if hidden.dtype == torch.float32:
        return rounded
    highest = rounded.topk(min(_NUM_EXACT, weight.shape[0]), dim=-1, sorted=False).indices
    exact = torch.einsum("rw,rkw->rk", hidden.float(), weight[highest].float())
    return rounded.scatter_(1, highest, exact)
