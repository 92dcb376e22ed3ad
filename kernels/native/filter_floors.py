"""Top-k, top-p and min-p as a single cutoff per row, without sorting."""

import torch
from torch import Tensor

from kernels.native.library import Library, library, pointer
from kernels.reference.filter_floors import check_filters


def filter_floors(
    logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor
) -> Tensor:
    """See `kernels.reference.filter_floors`, with which it agrees up to rounding.

    Reads a row once for its maximum, once for its total mass if top-p requires it, and once for the
    tokens near the maximum; only these are examined further.
    """
    return floors_of(library(), logits, temperatures, top_ks, top_ps, min_ps)


def floors_of(
    native: Library,
    logits: Tensor,
    temperatures: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
) -> Tensor:
    """`filter_floors` of a given library, which may be built for another processor."""
    check_filters(logits, temperatures, top_ks, top_ps, min_ps)
    logits = logits.float().contiguous()
    params = [t.contiguous() for t in (temperatures, top_ks, top_ps, min_ps)]
    floors = torch.empty(len(logits))
    native.functions.warren_filter_floors(
        native.team(),
        pointer(logits),
        *logits.shape,
        *map(pointer, params),
        pointer(floors),
    )
    return floors
