"""A projection with weights of 8 bits that have scales for blocks of the matrix."""

from torch import Tensor

from kernels.scaled_layout import check_scaled, dequantize_scaled


def scaled_linear(
    hidden: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    *,
    block: tuple[int, int],
) -> Tensor:
    """Return ``hidden @ weight.T + bias``, [num_tokens, outputs], summed in float32, rounded once.

    ``hidden`` is [num_tokens, inputs], ``bias`` [outputs] of the same dtype. ``codes``, [outputs,
    inputs], is int8, float8_e4m3fn or float8_e5m2. ``scales``, float32, has a number for each block
    of so many outputs and inputs; the last blocks may be cut off. A block has 32, 64 or a multiple
    of 128 inputs, or all. Raises `ValueError` if shapes do not match.
    """
    check_scaled(hidden, codes, scales, bias, block)
    product = hidden.float() @ dequantize_scaled(codes, scales, block).t()
    return (product if bias is None else product + bias.float()).to(hidden.dtype)
