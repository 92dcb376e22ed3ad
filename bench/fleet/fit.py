"""Finds what requests and events cost from what was measured at several loads."""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import msgspec
import numpy as np

from bench.fleet.point import Point
from bench.fleet.queues import QueuePoint, Queues
from bench.fleet.slow_streams import SlowStreams
from cli.size.costs import ROLES, Cost, Costs, Demand, Measured, ProcessRole, num_pairs

_PARTS = ("per_process", "per_pair", "per_request", "per_event", "per_wakeup")
"""The fields of `Cost` in which the cores are linear. But for the last, they have the order of the
fields of `Demand`."""
_WAKEUPS_PER_S = tuple(float(rate) for rate in np.geomspace(25, 6400, 17))
"""The rates of wake-ups among which the best is found."""
_SMALLEST_CORES = 0.02
"""What uses less is measured with an error of its own, to which others are compared."""


def demand_of(point: Point, role: ProcessRole) -> Demand:
    """What the processes of a role had to do."""
    numbers: Mapping[ProcessRole, int] = {
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


def fit(
    points: Sequence[Point], role: ProcessRole, known: Mapping[str, float] | None = None
) -> Cost:
    """The cost that predicts the cores of the points with the least relative error. ``known`` has
    the parts of the cost that are not to be found, by their names in `Cost`."""
    known = known or {}
    rates = [known["most_wakeups_per_s"]] if "most_wakeups_per_s" in known else _WAKEUPS_PER_S
    demands = [demand_of(point, role) for point in points]
    times = np.array([[*msgspec.structs.astuple(demand), 0.0] for demand in demands])
    measured = np.array([point.cores[role] for point in points])
    weights = 1 / np.maximum(measured, _SMALLEST_CORES)
    given = np.array([known.get(part, 0.0) for part in _PARTS])
    is_free = np.array([part not in known for part in _PARTS])
    found: list[tuple[float, float, Any]] = []
    for rate in rates:
        times[:, -1] = [demand.wakeups_per_s(rate) for demand in demands]
        rest = (measured - times @ given) * weights
        values = _non_negative(times * is_free * weights[:, None], rest) + given
        found.append((float(np.linalg.norm((times @ values - measured) * weights)), rate, values))
    _, rate, values = min(found, key=itemgetter(0))
    return Cost(**dict(zip(_PARTS, map(float, values), strict=True)), most_wakeups_per_s=rate)


def relative_error(costs: Mapping[str, Cost], point: Point) -> float:
    """Of the cores that are predicted for all processes of Warren and the broker, by the costs that
    `roles_of` returns."""
    broker = "broker" if point.num_nodes == 1 else "cluster"
    predicted = sum(
        costs[broker if role == "broker" else role].cores(demand_of(point, role)) for role in ROLES
    )
    return predicted / sum(point.cores[role] for role in ROLES) - 1


def left_out(points: Sequence[Point], announcements: Sequence[Point]) -> Sequence[float]:
    """The relative error of each load, predicted from costs that were fitted without it."""
    found = []
    for point in points:
        if point.answer_tokens:
            others = [other for other in points if other is not point]
            found.append(relative_error(roles_of(others, announcements), point))
    return found


def roles_of(points: Sequence[Point], announcements: Sequence[Point]) -> Mapping[str, Cost]:
    """The costs of workers, gateways, and brokers of one node and of three, by their names in
    `Costs`. The points of ``announcements`` have a single real worker."""
    single = [point for point in points if point.num_nodes == 1]
    cluster = [point for point in points if point.num_nodes > 1]
    broker = fit(single, "broker")
    # A single number of workers does not show what a pair costs, and fewer events than those of a
    # single node do not show what a wake-up costs.
    shared = ("per_pair", "per_wakeup", "most_wakeups_per_s")
    known = {part: getattr(broker, part) for part in shared}
    return {
        "worker": fit(points, "worker"),
        "gateway": fit([*points, *announcements], "gateway"),
        "broker": broker,
        "cluster": fit(cluster, "broker", known),
    }


def costs_of(
    about: dict[str, Any],
    points: Sequence[Point],
    announcements: Sequence[Point],
    queues: Queues,
    streams: SlowStreams,
) -> Costs:
    """See `roles_of` for ``points`` and ``announcements``."""
    costs = roles_of(points, announcements)
    return Costs(
        about=about,
        worker=costs["worker"],
        gateway=costs["gateway"],
        broker=costs["broker"],
        cluster=costs["cluster"],
        per_present_queue=_growth([one for one in queues.queues if one.num_nodes == 1]),
        per_job=next(one.cpu_s for one in queues.jobs if one.num_nodes == 1),
        stream_bytes={role: streams.stream_bytes[role] for role in ROLES},
        process_bytes={role: streams.process_bytes[role] for role in ROLES},
        stream_erlang_processes=streams.stream_erlang_processes,
        measured=Measured(
            num_workers=max(point.num_workers for point in points),
            num_streams=streams.num_streams,
            requests_per_s=max(point.received.requests_per_s for point in points),
            events_per_s=max(point.received.events_per_s for point in points),
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
