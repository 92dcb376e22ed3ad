"""Counts the results of all visits."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from tests.system.soak.answers import Answer
from tests.system.soak.questions import Question

Outcome: TypeAlias = Literal["exact", "left", "deadline", "cancelled", "wrong", "failed"]
"""``deadline`` and ``cancelled`` count only if the client asked for them."""


@dataclass
class Tally:
    """The results of the visits, by kind."""

    outcomes: Counter[tuple[str, Outcome]] = field(default_factory=Counter)
    num_requests: int = 0
    """HTTP requests, without the jobs of batches."""
    num_resumed: int = 0
    num_retried: int = 0
    """HTTP requests that were sent again, because a gateway had just lost its broker."""
    errors: list[str] = field(default_factory=list)
    """A line for each visit with an unexpected result."""

    @property
    def kinds(self) -> list[str]:
        return sorted({kind for kind, _ in self.outcomes})

    def num(self, outcome: Outcome, kind: str | None = None) -> int:
        """The number of visits with this result, of a kind or of all kinds."""
        return sum(
            num for (k, o), num in self.outcomes.items() if o == outcome and kind in (None, k)
        )

    def num_visits(self, kind: str | None = None) -> int:
        return sum(num for (k, _), num in self.outcomes.items() if kind in (None, k))

    def count(self, kind: str, outcome: Outcome) -> None:
        self.outcomes[kind, outcome] += 1

    def compare(self, kind: str, question: Question, answer: Answer, expected: Answer) -> None:
        """Count an answer that was read to its end."""
        if answer == expected:
            self.count(kind, "exact")
            return
        self.count(kind, "wrong")
        self.errors.append(f"{kind}: {question.name}: {_difference(answer, expected)}")

    def fail(self, kind: str, reason: str) -> None:
        self.count(kind, "failed")
        self.errors.append(f"{kind}: {reason}")


def _difference(answer: Answer, expected: Answer) -> str:
    pairs = zip(answer.choices, expected.choices, strict=False)
    differences = [
        f"choice {number} is {told} instead of {right}"
        for number, (told, right) in enumerate(pairs)
        if told != right
    ]
    return "; ".join(differences) or f"{_sizes(answer)} instead of {_sizes(expected)}"


def _sizes(answer: Answer) -> str:
    tokens = f"{answer.num_prompt_tokens} and {answer.num_tokens} tokens"
    return f"{len(answer.choices)} choices, {tokens}"
