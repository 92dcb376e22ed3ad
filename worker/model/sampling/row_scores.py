"""How likely tokens were, by the logits as they came from the model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.engine.interface import ScheduledSequence, StepScores, TokenScore


@dataclass(frozen=True, slots=True)
class ScoreInputs:
    """Which rows of a step's logits are scored: those of drawn tokens, then those of prompts."""

    score_rows: Tensor
    """[num_scores] int64."""
    score_ids: Tensor
    """int64: the last rows' tokens; the first rows' are those that they draw."""


class RowScores(NamedTuple):
    """One row for each of ``score_rows``."""

    logprobs: Tensor
    """[num_scores] float32."""
    top_ids: Tensor
    """[num_scores, depth] int64."""
    top_logprobs: Tensor
    """[num_scores, depth] float32."""


class ScorePlan:
    """Whose the scores of a step are."""

    def __init__(
        self, sampled: Sequence[ScheduledSequence], scored: Sequence[ScheduledSequence]
    ) -> None:
        """The logits of ``sampled`` come first, and behind them those that score prompts."""
        self._drawn = {
            row: sequence.sampling.logprobs
            for row, sequence in enumerate(sampled)
            if sequence.sampling.logprobs is not None
        }
        self._prompts = [(len(s.scored_ids), s.sampling.prompt_logprobs or 0) for s in scored]
        self._token_ids = [token_id for sequence in scored for token_id in sequence.scored_ids]
        self._num_sampled = len(sampled)
        self.depth = max([*self._drawn.values(), *(depth for _, depth in self._prompts)], default=0)
        """How many of the most likely tokens are told at most."""

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Lay out the step's `ScoreInputs`; empty where nobody asks for scores."""
        if not (self._drawn or self._prompts):
            return {}
        prompts = range(self._num_sampled, self._num_sampled + len(self._token_ids))
        return {
            "score_rows": np.array([*self._drawn, *prompts], np.int64),
            "score_ids": np.array(self._token_ids, np.int64),
        }

    def told(self, scores: RowScores) -> StepScores:
        """The scores, once they are on the host."""
        rows = zip(*(tensor.tolist() for tensor in scores), strict=True)

        def take(depth: int) -> TokenScore:
            logprob, top_ids, top_logprobs = next(rows)
            return TokenScore(logprob, top_ids[:depth], top_logprobs[:depth])

        drawn = {row: take(depth) for row, depth in self._drawn.items()}
        prompts = [[take(depth) for _ in range(count)] for count, depth in self._prompts]
        return StepScores(drawn, prompts)


def score(logits: Tensor, inputs: ScoreInputs, drawn: Tensor, depth: int) -> RowScores:
    """Score ``logits`` [num_scores, vocab_size], the rows of ``inputs``, and their best ``depth``.

    ``drawn`` is [num_sampled]. A row's scores depend on that row alone.
    """
    num_drawn = len(inputs.score_rows) - len(inputs.score_ids)
    token_ids = torch.cat((drawn[inputs.score_rows[:num_drawn]], inputs.score_ids))
    total = logits.logsumexp(dim=-1, keepdim=True)
    logprobs = (logits.gather(1, token_ids.unsqueeze(1)) - total).squeeze(1)
    top = logits.topk(min(depth, logits.shape[1]), dim=-1)
    return RowScores(logprobs, top.indices, top.values - total)
