"""Masks logits with the tokens that a grammar allows."""

import torch
from torch import Tensor

from kernels.shapes import check_shape

WORD_BITS = 32


def mask_logits(logits: Tensor, rows: Tensor, masks: Tensor) -> Tensor:
    """Set the logits of row ``rows[m]`` to -inf for tokens whose bit in ``masks[m]`` is 0.

    ``logits`` is [num_rows, vocab_size] float32, ``rows`` [num_masked] int64, in range and without
    duplicates, ``masks`` [num_masked, ceil(vocab_size / 32)] int32: token t is bit t % 32, counted
    from the lowest, of word t // 32, as in llguidance. Returns the logits; a provider may overwrite
    its input: use only the returned tensor. Raises `ValueError` if shapes do not match.
    """
    check_masks(logits, rows, masks)
    bits = torch.arange(WORD_BITS, dtype=torch.int32, device=masks.device)
    is_allowed = (masks.unsqueeze(-1) >> bits & 1).flatten(1)[:, : logits.shape[1]].bool()
    return logits.index_copy_(0, rows, logits[rows].masked_fill(~is_allowed, -torch.inf))


def check_masks(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Raise `ValueError` if shapes do not match."""
    check_shape("rows", rows, (None,))
    num_words = -(-logits.shape[1] // WORD_BITS)
    check_shape("masks", masks, (rows.shape[0], num_words))
