"""What is computed from the requests, and what no run may show."""

import pytest

from bench.affinity import FleetSetup
from bench.hedging import HedgingRun, check, prompt, summary
from bench.load import LoadError


def run_of(
    name: str, ttfts_s: tuple[float, ...], answers: tuple[str, ...] = ("a", "b")
) -> HedgingRun:
    return HedgingRun(
        system=FleetSetup(name=name, num_workers=4),
        answers=answers,
        ttfts_s=ttfts_s,
        hedges={"won": 1.0, "lost": 0.0, "cancelled": 0.0},
        num_tokens=400,
        num_computed=420.0,
        other_cores=0.0,
    )


def test_the_slow_fleet_is_compared_with_the_fleet_of_equal_workers() -> None:
    equal, slow = run_of("equal", (0.1,) * 10), run_of("slow", (0.15,) * 10)

    row = summary([equal, slow])[-1]

    assert row["p99_ratio"] == pytest.approx(1.5)
    assert row["hedges_won"] == 0.5


def test_the_tokens_that_no_client_asked_for_are_a_share_of_those_that_clients_have() -> None:
    (row,) = summary([run_of("hedged", (0.1,))])

    assert row["computed_twice"] == pytest.approx(0.05)


def test_systems_that_answer_differently_are_not_compared() -> None:
    equal, slow = run_of("equal", (0.1,)), run_of("slow", (0.1,), answers=("a", "changed"))

    with pytest.raises(LoadError, match="slow: answers differ"):
        check([equal, slow])


def test_no_prompt_begins_like_another() -> None:
    text = "word " * 1000

    assert len({prompt(number, text, 100)[:4] for number in range(50)}) == 50
