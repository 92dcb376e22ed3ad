"""Draws a token per row from its softmax."""

import torch
from torch import Tensor

from kernels.reference.most_likely import NO_TOKEN
from kernels.shapes import check_shape


def draw_rows(logits: Tensor, temperatures: Tensor, floors: Tensor, uniforms: Tensor) -> Tensor:
    """Draw a token for each row by inversion of its cumulative distribution: [num_rows] int64.

    ``logits`` is [num_rows, vocab_size]; the others are [num_rows] float32. A temperature of 0
    selects the row's most likely token. Otherwise tokens with a logit below the row's ``floors``
    are never drawn, and ``uniforms``, multiples of 2**-24 in [0, 1), determine the token. A row
    with NaN or infinity, or without a finite logit, has `NO_TOKEN`. A row's token depends on that
    row alone. Raises `ValueError` if shapes do not match.
    """
    check_draws(logits, temperatures, floors, uniforms)
    logits = logits.float()
    temperatures = temperatures.unsqueeze(1)
    most, most_likely = logits.max(dim=-1, keepdim=True)
    is_greedy = temperatures == 0
    # The maximum is subtracted first, so that no temperature, however small, causes an overflow.
    weights = ((logits - most) / temperatures.masked_fill(is_greedy, 1.0)).exp()
    cumulative = weights.masked_fill(logits < floors.unsqueeze(1), 0.0).cumsum(dim=-1)
    # u <= 1 - 2**-24 times the sum is rounded to less than the sum, so the selected token has a
    # positive weight; only NaN can select an index beyond the row, and it has no token at all.
    target = uniforms.unsqueeze(1) * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, target, right=True)
    return most_likely.where(is_greedy, drawn).where(most.isfinite(), NO_TOKEN).squeeze(1)


def check_draws(logits: Tensor, temperatures: Tensor, floors: Tensor, uniforms: Tensor) -> None:
    """Raise `ValueError` if shapes do not match."""
    num_rows, _ = logits.shape
    check_shape("temperatures", temperatures, (num_rows,))
    check_shape("floors", floors, (num_rows,))
    check_shape("uniforms", uniforms, (num_rows,))
