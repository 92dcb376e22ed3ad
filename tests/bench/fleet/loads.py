"""Loads whose costs are known."""

from collections.abc import Sequence

from bench.fleet.curve import NOTHING, Point
from bench.fleet.fit import demand_of
from bench.fleet.queues import JobPoint, QueuePoint, Queues
from bench.fleet.slow_streams import SlowStreams
from bench.fleet.users import Received
from cli.size.costs import ROLES, Cost, Role

TRUE: dict[Role, Cost] = {
    "worker": Cost(per_process=0.004, per_pair=0.0002, per_request=0.002, per_event=0.0004),
    "broker": Cost(per_process=0.02, per_pair=0.0003, per_request=0.004, per_event=0.0005),
    "gateway": Cost(per_process=0.01, per_pair=0.0005, per_request=0.003, per_event=0.0003),
}


def points(costs: dict[Role, Cost], num_nodes: int = 1) -> Sequence[Point]:
    """Loads that take exactly the cores that follow from the costs."""
    found = []
    for num_workers in (1, 4, 16):
        for answer_tokens in (0, 16, 64):
            received = NOTHING
            if answer_tokens:
                rate = 50.0 * num_workers
                received = Received(
                    tokens_per_s=rate,
                    events_per_s=rate,
                    requests_per_s=rate / answer_tokens,
                    ttft_p50_ms=200.0,
                )
            blank = Point(
                num_nodes=num_nodes,
                num_gateways=2,
                num_workers=num_workers,
                answer_tokens=answer_tokens,
                received=received,
                cores={},
                others=0.0,
            )
            cores = {role: costs[role].cores(demand_of(blank, role)) for role in ROLES}
            found.append(Point(**{**vars(blank), "cores": cores}))
    return found


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
