"""Log probabilities of tokens, from the logits before processing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.providers import Ops
from worker.engine.interface import ScheduledSequence, StepScores, TokenScore


@dataclass(frozen=True, slots=True)
class ScoreInputs:
    """The rows of a step's logits to score: the rows of drawn tokens, then the rows of prompts."""

    score_rows: Tensor
    """[num_scores] int64."""
    score_ids: Tensor
    """int64: the tokens of the prompts' rows; the other rows are scored with the tokens they
    draw."""


class RowScores(NamedTuple):
    """The scores, with a row for each of ``score_rows``."""

    logprobs: Tensor
    """[num_scores] float32."""
    top_ids: Tensor
    """[num_scores, depth] int64."""
    top_logprobs: Tensor
    """[num_scores, depth] float32."""


class ScorePlan:
    """The assignment of a step's scores to its sequences."""

    def __init__(
        self, sampled: Sequence[ScheduledSequence], scored: Sequence[ScheduledSequence]
    ) -> None:
        """The logits of ``sampled`` come first, followed by the logits that score prompts."""
        self._drawn = {
            row: sequence.sampling.logprobs
            for row, sequence in enumerate(sampled)
            if sequence.sampling.logprobs is not None
        }
        self._prompts = [(len(s.scored_ids), s.sampling.prompt_logprobs or 0) for s in scored]
        self._token_ids = [token_id for sequence in scored for token_id in sequence.scored_ids]
        self._num_sampled = len(sampled)
        self.depth = max([*self._drawn.values(), *(depth for _, depth in self._prompts)], default=0)
        """The maximum number of most likely tokens that are returned."""

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Lay out the step's `ScoreInputs`; empty if no scores are requested."""
        if not (self._drawn or self._prompts):
            return {}
        prompts = range(self._num_sampled, self._num_sampled + len(self._token_ids))
        return {
            "score_rows": np.array([*self._drawn, *prompts], np.int64),
            "score_ids": np.array(self._token_ids, np.int64),
        }

    def step_scores(self, scores: RowScores) -> StepScores:
        """Assign the scores, once they are on the host."""
        rows = zip(*(tensor.tolist() for tensor in scores), strict=True)

        def take(depth: int) -> TokenScore:
            logprob, top_ids, top_logprobs = next(rows)
            return TokenScore(logprob, top_ids[:depth], top_logprobs[:depth])

        drawn = {row: take(depth) for row, depth in self._drawn.items()}
        prompts = [[take(depth) for _ in range(count)] for count, depth in self._prompts]
        return StepScores(drawn, prompts)


def score(ops: Ops, logits: Tensor, inputs: ScoreInputs, drawn: Tensor, depth: int) -> RowScores:
    """Score ``logits`` [num_scores, vocab_size], the rows of ``inputs``, with the best ``depth``
    tokens.

    ``drawn`` is [num_sampled]. A row's scores depend on that row alone.
    """
    num_drawn = len(inputs.score_rows) - len(inputs.score_ids)
    token_ids = torch.cat((drawn[inputs.score_rows[:num_drawn]], inputs.score_ids))
    totals, top, top_ids = ops.rank_logits(logits, min(depth, logits.shape[1]))
    logprobs = logits.gather(1, token_ids.unsqueeze(1)).squeeze(1) - totals
    return RowScores(logprobs, top_ids, top - totals.unsqueeze(1))
