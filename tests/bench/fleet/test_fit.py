"""What requests and events cost, found from several loads."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.fleet.curve import Point
from bench.fleet.fit import costs_of, error, fit
from cli.size.costs import ROLES, Cost, Role
from tests.bench.fleet.loads import STREAMS, TRUE, points, queues


@pytest.mark.parametrize("role", ROLES)
def test_the_costs_of_requests_and_events_are_separated(role: Role) -> None:
    found = fit(points(TRUE), role)

    assert found.per_request == pytest.approx(TRUE[role].per_request)
    assert found.per_event == pytest.approx(TRUE[role].per_event)
    assert found.per_process == pytest.approx(TRUE[role].per_process)
    assert found.per_pair == pytest.approx(TRUE[role].per_pair)


@given(noise=st.lists(st.floats(0.8, 1.25), min_size=9, max_size=9))
def test_no_cost_is_negative_and_errors_are_not_larger_than_those_of_the_points(
    noise: list[float],
) -> None:
    disturbed = [
        Point(**{**vars(point), "cores": {role: by * point.cores[role] for role in ROLES}})
        for point, by in zip(points(TRUE), noise, strict=True)
    ]

    found: dict[str, Any] = {role: fit(disturbed, role) for role in ROLES}

    assert all(value >= 0 for cost in found.values() for value in vars_of(cost))
    costs = costs_of({}, disturbed, points(TRUE, 3), queues(0.002), STREAMS)
    assert max(abs(error(costs, point)) for point in disturbed) < 0.6


def vars_of(cost: Cost) -> list[float]:
    return [getattr(cost, name) for name in Cost.__struct_fields__]


def test_the_costs_of_a_cluster_are_its_own() -> None:
    larger = {
        **TRUE,
        "broker": Cost(per_process=0.03, per_pair=0.0003, per_request=0.01, per_event=0.001),
    }

    costs = costs_of({}, points(TRUE), points(larger, 3), queues(0.002), STREAMS)

    assert costs.broker.per_request == pytest.approx(0.004)
    assert costs.cluster.per_request == pytest.approx(0.01)
    assert all(
        error(costs, point) == pytest.approx(0, abs=1e-6)
        for point in [*points(TRUE), *points(larger, 3)]
    )


def test_other_queues_make_a_queue_dearer_or_do_not() -> None:
    growing = costs_of({}, points(TRUE), points(TRUE, 3), queues(0.002, 0.003, 0.004), STREAMS)
    shrinking = costs_of({}, points(TRUE), points(TRUE, 3), queues(0.003, 0.002), STREAMS)

    assert growing.per_present_queue == pytest.approx(1e-6)
    assert shrinking.per_present_queue == 0


def test_the_largest_loads_are_those_that_were_measured() -> None:
    costs = costs_of({}, points(TRUE), points(TRUE, 3), queues(0.002), STREAMS)

    assert costs.measured.num_workers == 16
    assert costs.measured.num_streams == 10_000
    assert costs.measured.events_per_s == 800
    assert costs.measured.requests_per_s == 50
