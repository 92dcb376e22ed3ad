"""The residual connection and the normalisation that follows it, in one."""

from torch import Tensor

from kernels.reference.rms_norm import rms_norm
from kernels.shapes import check_shape


def add_rms_norm(
    hidden: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return ``(rms_norm(hidden + residual), hidden + residual)``.

    ``hidden`` and ``residual`` are [num_tokens, width], ``weight`` is [width], all of one dtype. A
    provider may write the results over ``hidden`` and ``residual``: use only what is returned.
    Raises `ValueError` if shapes differ.
    """
    check_shape("residual", residual, hidden.shape)
    total = hidden + residual
    return rms_norm(total, weight, eps), total
