"""A projection with weights in planes of codes and scales."""

import torch
from torch import Tensor

from kernels.planes import Planes, check_planes, dequantize_planes


def plane_linear(
    hidden: Tensor,
    planes: Planes,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return ``hidden @ weight.T + bias``, [num_tokens, outputs], summed in float32, rounded once.

    ``hidden`` is [num_tokens, inputs], ``bias`` [outputs] of the same dtype. The result has this
    dtype unless ``out_dtype`` is another. Kernels may round weights to the dtype of ``hidden``.
    Raises `ValueError` if shapes do not match.
    """
    check_planes(hidden, planes, bias)
    product = hidden.float() @ dequantize_planes(planes).t()
    return (product if bias is None else product + bias.float()).to(out_dtype or hidden.dtype)
