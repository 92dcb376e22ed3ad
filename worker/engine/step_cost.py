"""How long a step takes, learned from the steps that ran."""

import math
from dataclasses import dataclass

_MEMORY = 0.95
"""Weight of each step against the one after it: some twenty are remembered."""


@dataclass(slots=True)
class StepWork:
    """What a step computes, in the terms that its time depends on."""

    num_prompt_tokens: int = 0
    num_prompt_pairs: float = 0.0
    """A token of a prompt with each of those that it attends to, itself included."""
    num_decodes: int = 0
    num_decode_pairs: int = 0

    def add(self, start: int, num_tokens: int) -> None:
        """One sequence's tokens at ``start`` .. ``start + num_tokens - 1``; one is a decode."""
        if num_tokens == 1:
            self.num_decodes += 1
            self.num_decode_pairs += start + 1
        else:
            self.num_prompt_tokens += num_tokens
            self.num_prompt_pairs += num_tokens * (start + (num_tokens + 1) / 2)


class StepCost:
    """A sum of terms, one for each field of `StepWork` and one for the step itself.

    Their prices are those that, none below 0, fit the remembered steps best, in shares of each
    step's time: a step that took ten times as long as it should weighs a hundredth. They follow
    step by step, by coordinate descent from where they stood, the prompts' first: what one step
    alone does not tell apart is taken for the prompts' cost, which is the cautious side.
    """

    def __init__(self) -> None:
        self._prices = [0.0] * 5
        self._gram = [[0.0] * 5 for _ in range(5)]
        self._sums = [0.0] * 5
        self._has_learned = False

    def learn(self, work: StepWork, seconds: float) -> None:
        """Take note of a step that took ``seconds``."""
        row = [term / max(seconds, 1e-6) for term in _terms(work)]
        for i, term in enumerate(row):
            self._gram[i] = [
                _MEMORY * g + term * other for g, other in zip(self._gram[i], row, strict=True)
            ]
            self._sums[i] = _MEMORY * self._sums[i] + term
        self._descend()
        self._has_learned = True

    def seconds(self, work: StepWork) -> float:
        """How long a step of so much work takes."""
        return math.fsum(map(float.__mul__, self._prices, _terms(work)))

    def num_prompt_tokens(self, start: int, seconds: float) -> float:
        """How many tokens from ``start`` on can be computed in ``seconds``, beside a step's rest.

        0 before the first step was learned and where no time is left, infinitely many where
        tokens were seen to cost nothing.
        """
        if not self._has_learned or seconds <= 0:
            return 0.0
        # seconds = each * n + pair * n^2 / 2, solved in the form that needs no pair > 0.
        pair = self._prices[1]
        each = self._prices[0] + pair * (start + 0.5)
        divisor = each + math.sqrt(each * each + 2 * pair * seconds)
        return 2 * seconds / divisor if divisor > 0 else math.inf

    def _descend(self) -> None:
        """Set each price to the best beside the others as they stand, one after another."""
        for i, gram in enumerate(self._gram):
            if gram[i] > 1e-200:  # else all steps of this kind are forgotten, and it stays
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
