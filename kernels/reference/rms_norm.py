"""Root mean square normalization (Zhang and Sennrich, arXiv:1910.07467)."""

from torch import Tensor
from torch.nn import functional

from kernels.shapes import check_shape


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row to a mean square of 1, then by ``weight``.

    ``hidden`` is [..., width], ``weight`` is [width] of the same dtype. Computed in float32 and
    rounded once. Raises `ValueError` if the widths differ.
    """
    check_shape("weight", weight, hidden.shape[-1:])
    return functional.rms_norm(hidden, weight.shape, weight, eps)
