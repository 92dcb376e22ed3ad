"""Loads whose costs are known."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from bench.fleet.fit import demand_of
from bench.fleet.point import NOTHING, Point
from bench.fleet.queues import JobPoint, QueuePoint, Queues
from bench.fleet.slow_streams import SlowStreams
from bench.fleet.users import Received
from cli.size.costs import ROLES, Cost, ProcessRole

TRUE: Mapping[ProcessRole, Cost] = {
    "worker": Cost(
        per_process=0.004,
        per_pair=0.0002,
        per_request=0.002,
        per_event=0.0001,
        per_wakeup=0.0005,
        most_wakeups_per_s=100,
    ),
    "broker": Cost(
        per_process=0.02,
        per_pair=0.0003,
        per_request=0.004,
        per_event=0.0003,
        per_wakeup=0.0002,
        most_wakeups_per_s=400,
    ),
    "gateway": Cost(
        per_process=0.01,
        per_pair=0.0005,
        per_request=0.003,
        per_event=0.0001,
        per_wakeup=0.0003,
        most_wakeups_per_s=800,
    ),
}

_BLANK = Point(
    num_nodes=1,
    num_gateways=2,
    num_workers=1,
    answer_tokens=0,
    received=NOTHING,
    cores={},
    wakeups_per_s=dict.fromkeys(ROLES, 0.0),
    others=0.0,
)


def points(costs: Mapping[ProcessRole, Cost], num_nodes: int = 1) -> Sequence[Point]:
    """Loads that take exactly the cores that follow from the costs. The larger ones have a few
    events a second for each worker, and many."""
    return [
        _with_cores(
            replace(
                _BLANK,
                num_nodes=num_nodes,
                num_workers=num_workers,
                answer_tokens=answer_tokens,
                received=_received(rate * num_workers, answer_tokens) if rate else NOTHING,
            ),
            costs,
        )
        for num_workers in (1, 4, 16)
        for rate, answer_tokens in ((0, 0), (10, 16), (30, 100), (90, 30), (250, 200))
    ]


def announced(costs: Mapping[ProcessRole, Cost]) -> Sequence[Point]:
    """A gateway that hears of a single worker, and of many."""
    return [
        _with_cores(replace(_BLANK, num_gateways=1, num_workers=number), costs)
        for number in (1, 1000)
    ]


def _received(events_per_s: float, answer_tokens: int) -> Received:
    return Received(
        tokens_per_s=events_per_s,
        events_per_s=events_per_s,
        requests_per_s=events_per_s / answer_tokens,
        ttft_p50_ms=200.0,
    )


def _with_cores(point: Point, costs: Mapping[ProcessRole, Cost]) -> Point:
    return replace(point, cores={role: costs[role].cores(demand_of(point, role)) for role in ROLES})


STREAMS = SlowStreams(
    num_streams=10_000,
    num_gateways=4,
    num_workers=16,
    token_every_s=10,
    seconds=40,
    opened_per_s=80,
    events_per_s=1000,
    delay_p50_ms=100,
    delay_p99_ms=500,
    cores=dict.fromkeys((*ROLES, "client"), 0.5),
    others=0.0,
    stream_bytes=dict.fromkeys((*ROLES, "client"), 1000.0),
    process_bytes=dict.fromkeys((*ROLES, "client"), 1e8),
    stream_erlang_processes=6.0,
)


def queues(*cpu_s: float) -> Queues:
    jobs = [JobPoint(num_nodes=nodes, cpu_s=0.001 * nodes, per_s=500, others=0) for nodes in (1, 3)]
    return Queues(
        jobs=jobs,
        queues=[
            QueuePoint(num_nodes=1, num_present=1000 * k, cpu_s=one, per_s=100, others=0)
            for k, one in enumerate(cpu_s)
        ],
    )
