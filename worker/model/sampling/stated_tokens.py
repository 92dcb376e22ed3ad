"""Judges the tokens that an answer states by the logits of another computation of it.

On other hardware, sums are rounded differently, so that an answer may differ from its
recomputation although nothing is wrong. The random numbers are known, so it is also known how far
each token is from being drawn (Token-DiFR, arXiv:2511.20621).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.providers import Ops
from worker.engine.interface import Judgement, ScheduledSequence
from worker.model.sampling.logits_processor import EditInputs, edit
from worker.model.sampling.sampler import SamplingInputs, floors_of

_ROWS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class StatedInputs:
    """The tokens to judge; both tensors are [num_stated] int64."""

    stated_rows: Tensor
    stated_ids: Tensor


class JudgedRows(NamedTuple):
    """The fields of `Judgement`, each [num_stated]."""

    margins: Tensor
    logprobs: Tensor
    ranks: Tensor
    is_kept: Tensor

    def on_host(self) -> list[Judgement]:
        """Convert the rows, once they are on the host."""
        return list(map(Judgement, *(tensor.tolist() for tensor in self)))


def stated_arrays(sequences: Sequence[ScheduledSequence]) -> dict[str, NDArray[Any]]:
    """Lay out the `StatedInputs` of a batch; empty if no tokens are judged."""
    rows: list[int] = []
    token_ids: list[int] = []
    num_rows = 0
    for sequence in sequences:
        if sequence.is_sampled:
            rows += range(num_rows, num_rows + len(sequence.stated_ids))
            token_ids += sequence.stated_ids
            num_rows += 1 + sequence.num_drafts
    if not rows:
        return {}
    return {
        "stated_rows": np.array(rows, np.int64),
        "stated_ids": np.array(token_ids, np.int64),
    }


def judge(
    ops: Ops,
    logits: Tensor,
    sampling: SamplingInputs | None,
    edits: EditInputs | None,
    stated: StatedInputs,
) -> JudgedRows:
    """Judge tokens by the ``logits`` [num_sampled, vocab_size], which are not changed. The other
    inputs are as in `sample`."""
    if edits is not None:
        logits = edit(ops, logits.clone(), edits)
    if sampling is None:
        zeros = torch.zeros(len(logits), device=logits.device)
        draws = zeros, zeros - torch.inf, zeros
    else:
        draws = sampling.temperatures, floors_of(ops, logits, sampling), sampling.uniforms
    parts: list[JudgedRows] = []
    for start in range(0, len(stated.stated_rows), _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        rows, token_ids = stated.stated_rows[part], stated.stated_ids[part]
        parts.append(_judge_rows(logits[rows], token_ids, *(draw[rows] for draw in draws)))
    return JudgedRows(*map(torch.cat, zip(*parts, strict=True)))


def _judge_rows(
    logits: Tensor, token_ids: Tensor, temperatures: Tensor, floors: Tensor, uniforms: Tensor
) -> JudgedRows:
    """Judge a token for each row of the edited ``logits``; the others are [num_rows]."""
    logits = logits.double()
    token_ids, temperatures, floors, uniforms = (
        tensor.unsqueeze(1) for tensor in (token_ids, temperatures, floors, uniforms)
    )
    most = logits.max(dim=-1, keepdim=True).values
    chosen = logits.gather(1, token_ids)
    is_greedy = temperatures == 0
    is_kept = chosen >= floors
    weights = ((logits - most) / temperatures.masked_fill(is_greedy, 1.0)).exp()
    weights = weights.masked_fill((logits < floors) & is_kept, 0.0)
    ends = weights.cumsum(dim=-1)
    end, width, total = ends.gather(1, token_ids), weights.gather(1, token_ids), ends[:, -1:]
    number = uniforms * total
    distances = torch.maximum(end - width - number, number - end).clamp(min=0) / total
    distances = distances.masked_fill(chosen == -torch.inf, torch.inf)
    margins = (most - chosen).where(is_greedy, distances)
    judged = JudgedRows(
        margins=margins,
        logprobs=chosen - logits.logsumexp(dim=-1, keepdim=True),
        ranks=(logits > chosen).sum(dim=-1, keepdim=True) + 1,
        is_kept=is_kept & (chosen > -torch.inf),
    )
    return JudgedRows(*(tensor.squeeze(1) for tensor in judged))
