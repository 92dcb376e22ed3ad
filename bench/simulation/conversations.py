"""Conversations on virtual time: what their turns find in the caches of an exact fleet."""

from dataclasses import dataclass

import numpy as np

from bench.simulation.books import Books
from bench.simulation.exact import ExactFleet
from bench.simulation.spec import Spec
from bench.simulation.traffic import Arrivals, Lengths, Talk, Tenant

_PATIENCE_S = 3600.0
_FIRST_QUESTION_AT_S = 5.0
"""When the workers have announced themselves."""


@dataclass(frozen=True, kw_only=True)
class Conversations:
    """Conversations of equal size, which begin at about the same time."""

    count: int
    num_turns: int
    pause_s: float
    """The mean of a user's pause before a turn."""
    first_tokens: int
    """Of the first question."""
    question_tokens: int
    """Of a later one, with what the chat template adds."""
    answer_tokens: int


def hold(spec: Spec, talks: Conversations, num_workers: int, seed: int) -> Books:
    """Hold all conversations; returns what was recorded. Raises `RuntimeError` if they do not end
    within an hour."""
    tenant = Tenant(
        "users",
        answer=_exactly(talks.answer_tokens),
        talk=Talk(talks.num_turns, talks.pause_s, _exactly(talks.question_tokens)),
    )
    rng = np.random.default_rng(seed)
    at = _FIRST_QUESTION_AT_S + np.sort(rng.exponential(talks.pause_s, talks.count))
    tokens = np.full(talks.count, 1, dtype=np.int64)
    first = Arrivals(at, 0 * tokens, talks.first_tokens * tokens, talks.answer_tokens * tokens)
    num_answers = talks.count * talks.num_turns
    with ExactFleet(spec, [tenant], num_workers) as fleet:
        until = float(at[-1])
        fleet.advance(until, first)
        while fleet.books.answered.sum() < num_answers:
            until += 1.0
            if until > _PATIENCE_S:
                raise RuntimeError("the conversations do not end")
            fleet.advance(until, Arrivals.none())
        return fleet.books


def _exactly(num_tokens: int) -> Lengths:
    return Lengths(num_tokens, sigma=1e-9)
