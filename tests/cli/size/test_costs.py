"""The costs beside what `bench.fleet` and `bench.queue` measured."""

import json
from statistics import median

import pytest

from bench.fleet.results import Results
from bench.options import RESULTS
from cli.size.costs import ROLES, Demand, ProcessRole, load

FLEET = Results.read(RESULTS / "fleet.json")
QUEUE = json.loads((RESULTS / "queue.json").read_text())


def test_each_published_load_is_predicted_by_the_others() -> None:
    errors = list(map(abs, FLEET.errors()))

    assert max(errors) < 0.25
    assert median(errors) < 0.08


def test_the_costs_are_those_of_the_published_loads() -> None:
    found = FLEET.costs()

    assert found is not None
    for role in ROLES:
        work = Demand(num_processes=2, num_pairs=4, requests_per_s=10, events_per_s=1000)
        assert found.cost(role).cores(work) == pytest.approx(load().cost(role).cores(work), 1e-3)


@pytest.mark.parametrize("role", ["broker", "gateway"])
@pytest.mark.parametrize("name", ["relay", "hold"])
def test_another_benchmark_at_a_high_load_agrees(name: str, role: ProcessRole) -> None:
    """Without requests, and beyond the loads to which the costs were fitted."""
    measured = QUEUE[name]
    demand = Demand(
        num_processes=1,
        num_pairs=1,
        events_per_s=measured["tokens_per_s"] / measured["tokens_per_event"],
    )

    predicted = load().cost(role).cores(demand)

    assert predicted == pytest.approx(measured["cores_used"][role], rel=0.25)
