"""Finds what requests and events cost from what was measured at several loads."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from bench.fleet.curve import Point
from bench.fleet.queues import QueuePoint, Queues
from bench.fleet.slow_streams import SlowStreams
from cli.size.costs import ROLES, Cost, Costs, Demand, Measured, Role, num_pairs

_SMALLEST_CORES = 0.02
"""What uses less is measured with an error of its own, to which others are compared."""


def demand_of(point: Point, role: Role) -> Demand:
    """What the processes of a role had to do."""
    numbers: Mapping[Role, int] = {
        "worker": point.num_workers,
        "broker": point.num_nodes,
        "gateway": point.num_gateways,
    }
    return Demand(
        num_processes=numbers[role],
        num_pairs=num_pairs(role, point.num_workers, point.num_gateways),
        requests_per_s=point.received.requests_per_s,
        events_per_s=point.received.events_per_s,
    )


def fit(points: Sequence[Point], role: Role, *, per_pair: float | None = None) -> Cost:
    """The cost that predicts the cores of the points with the least relative error. The cost of a
    pair is found, too, unless it is given."""
    demands = np.array([msgspec.structs.astuple(demand_of(point, role)) for point in points])
    measured = np.array([point.cores[role] for point in points])
    weights = 1 / np.maximum(measured, _SMALLEST_CORES)
    pair = Cost.__struct_fields__.index("per_pair")
    if per_pair is not None:
        measured = measured - per_pair * demands[:, pair]
        demands[:, pair] = 0.0
    values = _non_negative(demands * weights[:, None], measured * weights)
    if per_pair is not None:
        values[pair] = per_pair
    return Cost(**dict(zip(Cost.__struct_fields__, map(float, values), strict=True)))


def error(costs: Costs, point: Point) -> float:
    """The relative error of the cores that are predicted for all processes of Warren and the
    broker."""
    predicted = sum(
        costs.cost(role, point.num_nodes).cores(demand_of(point, role)) for role in ROLES
    )
    return predicted / sum(point.cores[role] for role in ROLES) - 1


def costs_of(
    about: dict[str, Any],
    points: Sequence[Point],
    cluster: Sequence[Point],
    queues: Queues,
    streams: SlowStreams,
) -> Costs:
    loaded = [point for point in points if point.answer_tokens]
    broker = fit(points, "broker")
    return Costs(
        about=about,
        worker=fit(points, "worker"),
        gateway=fit(points, "gateway"),
        broker=broker,
        # One number of workers does not show what a pair costs.
        cluster=fit(cluster, "broker", per_pair=broker.per_pair),
        per_present_queue=_growth([one for one in queues.queues if one.num_nodes == 1]),
        per_job=next(one.cpu_s for one in queues.jobs if one.num_nodes == 1),
        stream_bytes={role: streams.stream_bytes[role] for role in ROLES},
        process_bytes={role: streams.process_bytes[role] for role in ROLES},
        stream_erlang_processes=streams.stream_erlang_processes,
        measured=Measured(
            num_workers=max(point.num_workers for point in points),
            num_streams=streams.num_streams,
            requests_per_s=max(point.received.requests_per_s for point in loaded),
            events_per_s=max(point.received.events_per_s for point in loaded),
        ),
    )


def _growth(points: Sequence[QueuePoint]) -> float:
    """The slope of a line through the CPU times for a queue; 0 if they do not grow."""
    if len(points) < 2:
        return 0.0
    slope, _ = np.polyfit([one.num_present for one in points], [one.cpu_s for one in points], 1)
    return max(0.0, float(slope))


def _non_negative(rows: Any, values: Any) -> Any:
    """The least squares' solution of ``rows @ x = values`` in which no x is negative. The terms
    that would be negative are left out, step by step."""
    found = np.zeros(rows.shape[1])
    used = [column for column in range(rows.shape[1]) if rows[:, column].any()]
    while used:
        solution, *_ = np.linalg.lstsq(rows[:, used], values, rcond=None)
        if (solution >= 0).all():
            found[used] = solution
            break
        used.pop(int(solution.argmin()))
    return found
