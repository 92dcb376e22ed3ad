"""A projection with 4-bit weights (AWQ: Lin et al., arXiv:2306.00978)."""

from torch import Tensor

from kernels.awq_layout import check_awq, dequantize_awq


def awq_linear(
    hidden: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor,
    bias: Tensor | None = None,
    *,
    group_size: int,
) -> Tensor:
    """Return ``hidden @ weight + bias``: [num_tokens, outputs], computed in float32, rounded once.

    ``hidden`` is [num_tokens, inputs], ``bias`` [outputs] of the same dtype. The weight is packed
    by `kernels.awq_layout.repack_awq`: ``qweight`` [inputs / 128, outputs, 16] int32, ``scales``
    [inputs / group_size, outputs] of any float dtype, ``zeros`` of the same shape in uint8. The
    number of inputs is a multiple of 128; a group has 16, 32, 64 or a multiple of 128 inputs.
    Raises `ValueError` if shapes do not match.
    """
    check_awq(hidden, qweight, scales, zeros, bias, group_size)
    product = hidden.float() @ dequantize_awq(qweight, scales, zeros)
    return (product if bias is None else product + bias.float()).to(hidden.dtype)
