"""The router of a mixture of experts (Shazeer et al., arXiv:1701.06538)."""

import torch
from torch import Tensor

from kernels.router import Router

_LEAST = 1e-20
"""This is added to the sum of sigmoids, because they may all be zero."""


def choose_experts(
    logits: Tensor, router: Router, correction: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the experts of each token, best first, and their weights: [num_tokens, top_k] int64
    and float32.

    ``logits`` is [num_tokens, num_experts], ``correction`` [num_experts].
    """
    scores = logits.float()
    if router.scores == "sparse mixer":
        return _mixed_sparsely(scores, router)
    if router.scores == "softmax":
        scores = scores.softmax(dim=-1)
    elif router.scores == "sigmoid":
        scores = scores.sigmoid()
    ranks = scores if correction is None else scores + correction
    if router.num_chosen_groups < router.num_groups:
        ranks = _within_best_groups(ranks, router)
    chosen = ranks.topk(router.top_k, dim=-1).indices
    weights = scores.gather(1, chosen)
    if router.scores == "softmax of chosen":
        weights = weights.softmax(dim=-1)
    if router.is_normalized:
        least = _LEAST if router.scores == "sigmoid" else 0.0
        weights = weights / (weights.sum(dim=-1, keepdim=True) + least)
    return chosen, weights * router.scale


def _mixed_sparsely(scores: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """The sparse mixer (Liu et al., arXiv:2409.12136)."""
    left, chosen, weights = scores, [], []
    for _ in range(router.top_k):
        best, expert = left.max(dim=-1, keepdim=True)
        is_far = (best - scores) / scores.abs().maximum(best) > router.spread
        weights.append(left.masked_fill(is_far, -torch.inf).softmax(dim=-1).gather(1, expert))
        chosen.append(expert)
        left = left.scatter(1, expert, -torch.inf)
    return torch.cat(chosen, dim=1), torch.cat(weights, dim=1)


def _within_best_groups(ranks: Tensor, router: Router) -> Tensor:
    groups = ranks.view(len(ranks), router.num_groups, -1)
    num_best = min(2, groups.shape[2]) if router.scores == "sigmoid" else 1
    best = groups.topk(num_best, dim=-1).values.sum(dim=-1)
    kept = best.topk(router.num_chosen_groups, dim=-1).indices
    is_hidden = torch.ones_like(best, dtype=torch.bool).scatter_(1, kept, value=False)
    return groups.masked_fill(is_hidden.unsqueeze(2), -torch.inf).view_as(ranks)
