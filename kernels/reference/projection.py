"""A projection: hidden states times a weight matrix."""

from torch import Tensor
from torch.nn import functional

from kernels.shapes import check_shape


def projection(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``hidden @ weight.T + bias``: [num_tokens, outputs].

    ``hidden`` is [num_tokens, inputs], ``weight`` [outputs, inputs], ``bias`` [outputs] or None,
    all of the same dtype. Raises `ValueError` if shapes differ.
    """
    check_shape("weight", weight, (None, hidden.shape[-1]))
    if bias is not None:
        check_shape("bias", bias, weight.shape[:1])
    return functional.linear(hidden, weight, bias)
