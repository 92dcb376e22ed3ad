"""Restricts rows of logits to allowed tokens."""

from torch import Tensor

from kernels.native.library import library, pointer
from kernels.reference.mask_logits import check_masks


def mask_logits(logits: Tensor, rows: Tensor, masks: Tensor) -> Tensor:
    """See `kernels.reference.mask_logits`."""
    check_masks(logits, rows, masks)
    logits, masks = logits.float().contiguous(), masks.contiguous()
    native = library()
    native.functions.warren_mask_logits(
        native.team(),
        pointer(logits),
        logits.shape[1],
        pointer(rows),
        pointer(masks),
        *masks.shape,
    )
    return logits
