"""Computes the deployment that a load takes, and how close it is to each limit.

The CPU time is that of `cli.size.costs`. A deployment has one broker, a single node or
a cluster of up to `MAX_NODES`; a load that exceeds a cluster is divided among several deployments,
which share nothing.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from cli.size.costs import Costs, Demand, ProcessRole, num_pairs
from worker.process.tuning import WORKER_TUNING

UTILIZATION = 0.7
"""The share of a core up to which a process is loaded. Beyond it, queues and delays grow."""
MEMORY_SHARE = 0.6
"""A broker blocks publishers at this share of its machine's memory: see rabbitmq.conf."""
MAX_NODES = 7
ERLANG_PROCESSES = 1_048_576
"""The limit of a node, unless it is started with another ``+P``."""
ANNOUNCEMENT_SHARE = 0.02
"""The part of a gateway's core that is reserved for the announcements of workers."""
CHANNELS_PER_CONNECTION = 1500
"""The channels of a gateway's connection to the broker. Each stream has its own channel, and
another connection is opened when they are used up."""
EVENTS_PER_S: float = WORKER_TUNING.stream_events_per_s
"""The most events of a stream in a second, after the first tokens."""
TOKENS_AT_ONCE = 10
"""The first tokens of an answer, which have an event each: see `worker.decode.bridge`."""
_MIN_GATEWAYS = 2
_SPARE_WORKERS = 1


@dataclass(frozen=True, kw_only=True)
class Load:
    """What users ask for, at the same time."""

    num_streams: float
    requests_per_s: float
    tokens_per_s: float
    tokens_per_event: float = 1.0
    """Under load, an event has several tokens."""

    @property
    def events_per_s(self) -> float:
        return self.tokens_per_s / self.tokens_per_event


@dataclass(frozen=True, kw_only=True)
class Machines:
    """The capacity of a process of each kind."""

    worker_tokens_per_s: float
    """Tokens per second of the model on a worker's device, all streams together."""
    worker_streams: float
    """Sequences that a worker runs at once: WARREN_MAX_NUM_SEQS."""
    node_cores: float
    node_bytes: float
    gateway_streams: float
    """WARREN_MAX_REQUESTS."""
    core_speed: float = 1.0
    """How fast a core is, relative to the cores with which the costs were measured."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """How much of a limit the load uses."""

    name: str
    used: float
    """1 is all of it."""
    remedy: str
    """What removes the limit."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """A deployment, or several equal ones, for a load. Numbers of processes cover all of them."""

    num_deployments: int
    num_nodes: int
    num_gateways: int
    num_workers: int
    broker_cores: float
    gateway_cores: float
    worker_cores: float
    """CPU of the workers without their models."""
    node_bytes: float
    """The memory of a node."""
    gateway_bytes: float
    """The memory of a gateway."""
    num_connections: int
    """The connections of all gateways to the broker."""
    limits: Sequence[Limit]
    """The limits of a deployment, the most used first."""


def paced_tokens_per_event(tokens_per_request: float, stream_tokens_per_s: float) -> float:
    """The tokens in an event of an interactive stream on average, at a low load."""
    num_at_once = min(TOKENS_AT_ONCE, tokens_per_request)
    tokens_of_others = max(1.0, stream_tokens_per_s / EVENTS_PER_S)
    num_others = (tokens_per_request - num_at_once) / tokens_of_others
    return tokens_per_request / (num_at_once + num_others)


def size(load: Load, machines: Machines, costs: Costs) -> Size:
    """The smallest deployment that takes the load. More load never needs less of anything."""
    num_workers = _SPARE_WORKERS + math.ceil(
        max(
            load.tokens_per_s / machines.worker_tokens_per_s,
            load.num_streams / machines.worker_streams,
        )
    )
    num_gateways = _gateways(load, machines, costs)
    fleet = _Fleet(load, machines, costs, num_gateways, num_workers)
    num_deployments, num_nodes = fleet.brokers()
    gateway_streams = load.num_streams / num_gateways
    return Size(
        num_deployments=num_deployments,
        num_nodes=num_deployments * num_nodes,
        num_gateways=num_gateways,
        num_workers=num_workers,
        broker_cores=num_deployments * fleet.broker_cores(num_deployments, num_nodes),
        gateway_cores=fleet.cores("gateway", num_deployments),
        worker_cores=fleet.cores("worker", num_deployments),
        node_bytes=fleet.node_bytes(num_deployments, num_nodes),
        gateway_bytes=costs.process_bytes["gateway"]
        + gateway_streams * costs.stream_bytes["gateway"],
        num_connections=num_gateways
        * (1 + max(1, math.ceil(gateway_streams / CHANNELS_PER_CONNECTION))),
        limits=sorted(
            fleet.limits(num_deployments, num_nodes), key=lambda one: one.used, reverse=True
        ),
    )


def _gateways(load: Load, machines: Machines, costs: Costs) -> int:
    """The fewest gateways of which none is loaded beyond its share."""
    cost = costs.gateway
    share = (UTILIZATION - ANNOUNCEMENT_SHARE) * machines.core_speed

    def fits(num_gateways: int) -> bool:
        demand = Demand(
            num_processes=num_gateways,
            requests_per_s=load.requests_per_s,
            events_per_s=load.events_per_s,
        )
        return cost.cores(demand) <= share * num_gateways

    by_streams = math.ceil(load.num_streams / machines.gateway_streams)
    few = max(_MIN_GATEWAYS, by_streams)
    # At most, each event wakes a gateway up.
    alone = cost.per_request * load.requests_per_s
    alone += (cost.per_event + cost.per_wakeup) * load.events_per_s
    many = max(few, math.ceil(alone / (share - cost.per_process)))
    return bisect_left(range(many), True, lo=few, key=fits)


@dataclass(frozen=True)
class _Fleet:
    """Equal deployments, each with a broker of several nodes."""

    load: Load
    machines: Machines
    costs: Costs
    num_gateways: int
    num_workers: int

    def brokers(self) -> tuple[int, int]:
        """The fewest deployments, and nodes of each, with no limit exceeded."""
        for num_nodes in range(1, MAX_NODES + 1, 2):
            if self._fits(1, num_nodes):
                return 1, num_nodes
        few, many = 1, 2
        while not self._fits(many, MAX_NODES):
            few, many = many, 2 * many
        while few + 1 < many:
            middle = (few + many) // 2
            few, many = (few, middle) if self._fits(middle, MAX_NODES) else (middle, many)
        return many, MAX_NODES

    def _fits(self, num_deployments: int, num_nodes: int) -> bool:
        return all(one.used <= 1 for one in self.limits(num_deployments, num_nodes))

    def limits(self, num_deployments: int, num_nodes: int) -> list[Limit]:
        """The limits of a deployment."""
        costs, machines = self.costs, self.machines
        streams = self.load.num_streams / num_deployments
        requests_per_s = self.load.requests_per_s / num_deployments
        usable = UTILIZATION * machines.core_speed
        node_cores = usable * machines.node_cores
        announcing = self.num_workers / num_deployments
        return [
            Limit(
                name="CPU of the broker",
                used=self.broker_cores(num_deployments, num_nodes)
                / (UTILIZATION * machines.node_cores * num_nodes),
                remedy="more nodes, or nodes with more cores",
            ),
            Limit(
                name="declarations of queues, which each node repeats",
                used=requests_per_s * self._per_further_node / node_cores,
                remedy="more deployments; fewer and longer requests",
            ),
            Limit(
                name="Raft commits of one model's job queue",
                used=requests_per_s * costs.per_job / usable,
                remedy="a second name for the model, on other workers; more deployments",
            ),
            Limit(
                name="memory of a node",
                used=self.node_bytes(num_deployments, num_nodes)
                / (MEMORY_SHARE * machines.node_bytes),
                remedy="more nodes, or nodes with more memory",
            ),
            Limit(
                name="channels and queues: Erlang processes of a node",
                used=streams * costs.stream_erlang_processes / num_nodes / ERLANG_PROCESSES,
                remedy="more nodes; RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS='+P 5000000'",
            ),
            Limit(
                name="announcements of workers to each gateway",
                used=announcing * costs.gateway.per_pair / machines.core_speed / ANNOUNCEMENT_SHARE,
                remedy="larger workers; more deployments",
            ),
        ]

    def demand(self, role: ProcessRole, num_deployments: int, num_nodes: int = 1) -> Demand:
        """What the processes of a role in a deployment have to do."""
        num_workers = self.num_workers / num_deployments
        num_gateways = self.num_gateways / num_deployments
        numbers = {"worker": num_workers, "broker": num_nodes, "gateway": num_gateways}
        return Demand(
            num_processes=numbers[role],
            num_pairs=num_pairs(role, num_workers, num_gateways),
            requests_per_s=self.load.requests_per_s / num_deployments,
            events_per_s=self.load.events_per_s / num_deployments,
        )

    def cores(self, role: ProcessRole, num_deployments: int) -> float:
        """The cores that the workers or the gateways of all deployments need."""
        cores = self.costs.cost(role).cores(self.demand(role, num_deployments))
        return num_deployments * cores / self.machines.core_speed

    def broker_cores(self, num_deployments: int, num_nodes: int) -> float:
        """The cores that the broker of a deployment needs, on all its nodes together."""
        present = self.load.num_streams / num_deployments
        work = self.demand("broker", num_deployments, num_nodes)
        further = max(0, num_nodes - 3) * self._per_further_node
        extra = work.requests_per_s * (further + present * self.costs.per_present_queue)
        return (self.costs.cost("broker", num_nodes).cores(work) + extra) / self.machines.core_speed

    def node_bytes(self, num_deployments: int, num_nodes: int) -> float:
        streams = self.load.num_streams / num_deployments / num_nodes
        return self.costs.process_bytes["broker"] + streams * self.costs.stream_bytes["broker"]

    @property
    def _per_further_node(self) -> float:
        """The CPU time by which a request costs a broker more for each node beyond the first."""
        return max(0.0, self.costs.cluster.per_request - self.costs.broker.per_request) / 2
