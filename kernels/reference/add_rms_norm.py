"""The residual connection fused with the normalization that follows it."""

from torch import Tensor

from kernels.reference.rms_norm import rms_norm
from kernels.shapes import check_shape


def add_rms_norm(
    hidden: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return ``(rms_norm(hidden + residual), hidden + residual)``.

    ``hidden`` and ``residual`` are [num_tokens, width], ``weight`` is [width], all of the same
    dtype. A provider may overwrite ``hidden`` and ``residual``: use only the returned tensors.
    Raises `ValueError` if shapes do not match.
    """
    check_shape("residual", residual, hidden.shape)
    total = hidden + residual
    return rms_norm(total, weight, eps), total
