"""Finds the most likely token of each row."""

from torch import Tensor


def most_likely(logits: Tensor) -> Tensor:
    """Return the token with the highest of each row's ``logits``: [num_rows] int64.

    ``logits`` is [num_rows, vocab_size].
    """
    return logits.argmax(dim=-1)
