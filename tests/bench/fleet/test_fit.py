"""What requests and events cost, found from several loads."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.fleet.fit import costs_of, fit, left_out, relative_error, roles_of
from bench.fleet.point import Point
from bench.fleet.queues import Queues
from cli.size.costs import ROLES, Cost, Costs, ProcessRole
from tests.bench.fleet.loads import STREAMS, TRUE, announced, points, queues

SINGLE = points(TRUE)
CLUSTER = points(TRUE, 3)


def found_from(queue: Queues, cluster: Sequence[Point] = CLUSTER) -> Costs:
    return costs_of({}, [*SINGLE, *cluster], announced(TRUE), queue, STREAMS)


def parts_of(cost: Cost) -> Mapping[str, float]:
    return msgspec.structs.asdict(cost)


@pytest.mark.parametrize("role", ROLES)
def test_the_parts_of_a_cost_are_separated(role: ProcessRole) -> None:
    found = fit(SINGLE, role)

    assert parts_of(found) == pytest.approx(parts_of(TRUE[role]), rel=0.01)


def test_a_part_that_is_known_is_kept() -> None:
    known = {"per_pair": 0.001, "most_wakeups_per_s": 77.0}

    found = parts_of(fit(SINGLE, "gateway", known))

    assert known.items() <= found.items()


@given(noise=st.lists(st.floats(0.8, 1.25), min_size=15, max_size=15))
def test_no_cost_is_negative_and_errors_are_not_larger_than_those_of_the_points(
    noise: list[float],
) -> None:
    disturbed = [
        replace(point, cores={role: by * point.cores[role] for role in ROLES})
        for point, by in zip(SINGLE, noise, strict=True)
    ]

    found = roles_of([*disturbed, *CLUSTER], announced(TRUE))

    assert all(part >= 0 for cost in found.values() for part in parts_of(cost).values())
    assert max(abs(relative_error(found, point)) for point in disturbed) < 0.6


def test_the_costs_of_a_cluster_are_its_own() -> None:
    broker = TRUE["broker"]
    larger = points({**TRUE, "broker": msgspec.structs.replace(broker, per_request=0.01)}, 3)

    costs = found_from(queues(0.002), larger)

    assert costs.broker.per_request == pytest.approx(broker.per_request, rel=0.01)
    assert costs.cluster.per_request == pytest.approx(0.01, rel=0.01)


def test_a_load_is_predicted_from_the_other_loads() -> None:
    errors = left_out([*SINGLE, *CLUSTER], announced(TRUE))

    assert len(errors) == sum(point.answer_tokens > 0 for point in (*SINGLE, *CLUSTER))
    assert max(map(abs, errors)) < 0.01


def test_a_load_that_does_not_fit_the_others_has_a_large_error() -> None:
    odd = SINGLE[7]
    doubled = replace(odd, cores={role: 2 * cores for role, cores in odd.cores.items()})
    others = [point for point in (*SINGLE, *CLUSTER) if point is not odd]

    errors = left_out([doubled, *others], announced(TRUE))

    assert errors[0] == pytest.approx(-0.5, abs=0.05)


def test_other_queues_make_a_queue_dearer_or_do_not() -> None:
    growing, shrinking = found_from(queues(0.002, 0.003, 0.004)), found_from(queues(0.003, 0.002))

    assert growing.per_present_queue == pytest.approx(1e-6)
    assert shrinking.per_present_queue == 0


def test_the_largest_loads_are_those_that_were_measured() -> None:
    costs = found_from(queues(0.002))

    assert costs.measured.num_workers == 16
    assert costs.measured.num_streams == 10_000
    assert costs.measured.events_per_s == 4000
    assert costs.measured.requests_per_s == 48
