"""Finds the most likely token of each row."""

from torch import Tensor

NO_TOKEN = -1
"""The token of a row with NaN or infinity, or without a finite logit."""


def most_likely(logits: Tensor) -> Tensor:
    """Return the token with the highest of each row's ``logits``, or `NO_TOKEN`: [num_rows] int64.

    ``logits`` is [num_rows, vocab_size]. Logits of -infinity are allowed beside finite logits.
    """
    most, tokens = logits.max(dim=-1)  # the maximum with NaN is NaN
    return tokens.where(most.isfinite(), NO_TOKEN)
