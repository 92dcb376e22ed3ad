"""Finds the most likely tokens of each row, and the total that makes logits log probabilities."""

import torch
from torch import Tensor


def rank_logits(logits: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log of the sum of each row's exponentials, [num_rows], then its ``depth`` highest
    logits and their tokens, highest first: [num_rows, depth] float32 and int64.

    ``logits`` is [num_rows, vocab_size] float32, with at least ``depth`` columns. The sum of a row
    with NaN or infinity, or without a finite logit, is NaN.
    """
    top = logits.topk(depth, dim=-1)
    totals = logits.logsumexp(dim=-1)
    return totals.where(totals.isfinite(), torch.nan), top.values, top.indices
