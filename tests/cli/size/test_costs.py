"""The costs beside what `bench.fleet` and `bench.queue` measured."""

import json
from statistics import median

import pytest

from bench.fleet.fit import error
from bench.fleet.results import Results
from bench.options import RESULTS
from cli.size.costs import ROLES, Demand, load


def test_the_published_loads_are_predicted() -> None:
    points = Results.read(RESULTS / "fleet.json").points

    errors = [abs(error(load(), point)) for point in points if point.answer_tokens]

    assert max(errors) < 0.25
    assert median(errors) < 0.06


@pytest.mark.parametrize("name", ["relay", "hold"])
def test_a_gateway_under_high_load_is_not_underestimated(name: str) -> None:
    """Processes handle several events at a time then, for less than the costs say."""
    measured = json.loads((RESULTS / "queue.json").read_text())[name]
    demand = Demand(
        num_processes=1,
        num_pairs=1,
        events_per_s=measured["tokens_per_s"] / measured["tokens_per_event"],
    )

    predicted = sum(load().cost(role).cores(demand) for role in ROLES)

    assert predicted > sum(measured["cores_used"][role] for role in ROLES)
