"""Draws a token per row from its softmax, by inversion of its cumulative distribution."""

import torch
from torch import Tensor

from kernels.native.library import Library, library, pointer
from kernels.reference.draw_rows import check_draws


def draw_rows(logits: Tensor, temperatures: Tensor, floors: Tensor, uniforms: Tensor) -> Tensor:
    """See `kernels.reference.draw_rows`, with which it agrees up to rounding.

    Reads a greedy row twice, other rows three times and a part of them again.
    """
    return drawn_from(library(), logits, temperatures, floors, uniforms)


def drawn_from(
    native: Library, logits: Tensor, temperatures: Tensor, floors: Tensor, uniforms: Tensor
) -> Tensor:
    """`draw_rows` of a given library, which may be built for another processor."""
    check_draws(logits, temperatures, floors, uniforms)
    logits = logits.float().contiguous()
    params = [t.contiguous() for t in (temperatures, floors, uniforms)]
    drawn = torch.empty(len(logits), dtype=torch.int64)
    native.functions.warren_draw_rows(
        native.team(),
        pointer(logits),
        *logits.shape,
        *map(pointer, params),
        pointer(drawn),
    )
    return drawn
