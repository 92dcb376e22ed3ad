"""Penalties, biases and bans of individual tokens."""

from torch import Tensor

from kernels.shapes import check_shape


def adjust_logits(
    logits: Tensor, rows: Tensor, token_ids: Tensor, repetitions: Tensor, biases: Tensor
) -> Tensor:
    """Change the logit of token ``token_ids[j]`` in row ``rows[j]``, for each entry j.

    A positive logit is divided by ``repetitions[j]``, any other is multiplied by it (Keskar et al.,
    arXiv:1909.05858). Then ``biases[j]`` is added; -inf bans the token. ``logits`` is [num_rows,
    vocab_size] float32, the others are [num_entries]: ``rows`` and ``token_ids`` int64, in range
    and without duplicate pairs, ``repetitions`` (positive) and ``biases`` float32. Returns the
    logits; a provider may overwrite its input: use only the returned tensor. Raises `ValueError` if
    shapes do not match.
    """
    check_entries(rows, token_ids, repetitions, biases)
    chosen = logits[rows, token_ids]
    penalized = (chosen / repetitions).where(chosen > 0, chosen * repetitions)
    return logits.index_put_((rows, token_ids), penalized + biases)


def check_entries(rows: Tensor, token_ids: Tensor, repetitions: Tensor, biases: Tensor) -> None:
    """Raise `ValueError` if shapes do not match."""
    check_shape("rows", rows, (None,))
    check_shape("token_ids", token_ids, rows.shape)
    check_shape("repetitions", repetitions, rows.shape)
    check_shape("biases", biases, rows.shape)
