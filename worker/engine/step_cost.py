"""A model of the duration of a step, fitted to past steps."""

import math
from dataclasses import dataclass

_MEMORY = 0.95
"""Exponential decay per step: about twenty steps are remembered."""


@dataclass(slots=True)
class StepWork:
    """The work in a step, as the features of the cost model."""

    num_prompt_tokens: int = 0
    num_prompt_pairs: float = 0.0
    """Pairs of a prompt token and a token that it attends to, including itself."""
    num_decodes: int = 0
    num_decode_pairs: int = 0

    def add(self, start: int, num_tokens: int) -> None:
        """Add a sequence's tokens at ``start`` .. ``start + num_tokens - 1``; a single token is a
        decode."""
        if num_tokens == 1:
            self.num_decodes += 1
            self.num_decode_pairs += start + 1
        else:
            self.num_prompt_tokens += num_tokens
            self.num_prompt_pairs += num_tokens * (start + (num_tokens + 1) / 2)


class StepCost:
    """A linear model: a term for each field of `StepWork`, and a constant.

    The coefficients are the non-negative least-squares fit to the remembered steps, with relative
    errors: a step that took ten times as long as usual has a hundredth of the weight. They are
    updated step by step with coordinate descent, prompt terms first. A cost that a single step
    cannot attribute is therefore attributed to prompts, which is the cautious choice.
    """

    def __init__(self) -> None:
        self._prices = [0.0] * 5
        self._gram = [[0.0] * 5 for _ in range(5)]
        self._sums = [0.0] * 5
        self._has_learned = False

    def learn(self, work: StepWork, seconds: float) -> None:
        """Record a step that took ``seconds``."""
        row = [term / max(seconds, 1e-6) for term in _terms(work)]
        for i, term in enumerate(row):
            self._gram[i] = [
                _MEMORY * g + term * other for g, other in zip(self._gram[i], row, strict=True)
            ]
            self._sums[i] = _MEMORY * self._sums[i] + term
        self._descend()
        self._has_learned = True

    def seconds(self, work: StepWork) -> float:
        """The predicted duration of a step."""
        return math.fsum(map(float.__mul__, self._prices, _terms(work)))

    def next_prompt_token_s(self, start: int) -> float:
        """The predicted duration that another prompt token adds, at ``start``."""
        return self._prices[0] + self._prices[1] * (start + 1)

    def num_prompt_tokens(self, start: int, seconds: float) -> float:
        """The number of tokens from ``start`` on that fit into ``seconds``.

        Returns 0 before the first step was recorded or if no time is left, and infinity if tokens
        have no measurable cost.
        """
        if not self._has_learned or seconds <= 0:
            return 0.0
        # seconds = each * n + pair * n^2 / 2, solved in the form that is stable for pair = 0.
        pair = self._prices[1]
        each = self._prices[0] + pair * (start + 0.5)
        divisor = each + math.sqrt(each * each + 2 * pair * seconds)
        return 2 * seconds / divisor if divisor > 0 else math.inf

    def _descend(self) -> None:
        """Minimize over each coefficient in turn, with the others fixed."""
        for i, gram in enumerate(self._gram):
            if gram[i] > 1e-200:  # otherwise no such step is remembered; keep it
                rest = self._sums[i] - sum(map(float.__mul__, gram, self._prices))
                self._prices[i] = max(0.0, self._prices[i] + rest / gram[i])


def _terms(work: StepWork) -> tuple[float, float, float, float, float]:
    return (
        float(work.num_prompt_tokens),
        work.num_prompt_pairs,
        1.0,
        float(work.num_decodes),
        float(work.num_decode_pairs),
    )
