"""The costs beside what `bench.queue` measured: a gateway and a worker under two loads."""

import json
from pathlib import Path

import pytest

from cli.size.costs import ROLES, Demand, load

RESULTS = Path(__file__).parents[3] / "bench" / "results" / "queue.json"


@pytest.mark.parametrize("name", ["relay", "hold"])
def test_the_cores_of_a_measured_load_are_predicted_within_15_percent(name: str) -> None:
    measured = json.loads(RESULTS.read_text())[name]
    demand = Demand(
        num_processes=1,
        num_pairs=1,
        events_per_s=measured["tokens_per_s"] / measured["tokens_per_event"],
    )

    predicted = sum(load().cost(role).cores(demand) for role in ROLES)

    assert predicted == pytest.approx(sum(measured["cores_used"][role] for role in ROLES), rel=0.15)
