"""What requests, events and streams cost each kind of process.

The values are in ``costs.json``, which `bench.fleet` writes.
"""

from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import msgspec

from shared.topology import MAX_PEERS

ProcessRole: TypeAlias = Literal["worker", "broker", "gateway"]
ROLES: tuple[ProcessRole, ...] = get_args(ProcessRole)
PATH = Path(__file__).with_name("costs.json")


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What all processes of one kind have to do."""

    num_processes: float
    num_pairs: float = 0.0
    """Pairs of a worker and a process of this kind that receives its announcements: all gateways,
    and other workers, as many as a worker listens to. The broker delivers the announcements of all
    pairs."""
    requests_per_s: float = 0.0
    events_per_s: float = 0.0
    """Events with tokens. The other events of an answer are part of the cost of its request."""

    def wakeups_per_s(self, most: float) -> float:
        """How often the processes wake up for events, if each can do so ``most`` times a second.

        A process that has woken up is busy for some time, during which other events gather. So the
        mean time between two wake-ups is that between two events plus that of the work.
        """
        limit = most * self.num_processes
        return self.events_per_s * limit / (self.events_per_s + limit) if limit else 0.0


def num_pairs(role: ProcessRole, num_workers: float, num_gateways: float) -> float:
    """See `Demand.num_pairs`."""
    peers = min(num_workers, MAX_PEERS)
    listeners = {
        "worker": peers,
        "broker": peers + num_gateways,
        "gateway": num_gateways,
    }
    return num_workers * listeners[role]


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """CPU time in seconds, of all processes of one kind together. No time is negative."""

    per_process: float
    """For each second of a process without load."""
    per_pair: float
    """For each second and pair of a worker and a process that receives its announcements."""
    per_request: float
    per_event: float
    """For each event, however many arrive together."""
    per_wakeup: float
    """For waking up, and for what a process does once for all events that have arrived."""
    most_wakeups_per_s: float
    """The rate of a process that never waits for events."""

    def cores(self, demand: Demand) -> float:
        """The cores that the work keeps busy."""
        return (
            self.per_process * demand.num_processes
            + self.per_pair * demand.num_pairs
            + self.per_request * demand.requests_per_s
            + self.per_event * demand.events_per_s
            + self.per_wakeup * demand.wakeups_per_s(self.most_wakeups_per_s)
        )


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The largest loads that were measured. All beyond is extrapolated."""

    num_workers: int
    num_streams: int
    requests_per_s: float
    events_per_s: float


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was measured, and on which machine."""

    about: dict[str, Any]
    """Date, commit, machine and versions."""
    worker: Cost
    gateway: Cost
    broker: Cost
    """A broker of one node."""
    cluster: Cost
    """All nodes of a broker of three nodes."""
    per_present_queue: float
    """The broker's CPU time for declaring, reading and deleting a queue grows by so much with each
    other queue."""
    per_job: float
    """The broker's CPU time to publish, deliver and acknowledge a job, in a quorum queue of one
    node."""
    stream_bytes: dict[ProcessRole, float]
    """The memory of an open stream."""
    process_bytes: dict[ProcessRole, float]
    """The memory of a process without streams."""
    stream_erlang_processes: float
    """Processes of Erlang that the broker runs for an open stream."""
    measured: Measured
    estimated: str = ""
    """A sentence about the costs that are estimated instead; empty if no cost is estimated."""

    def cost(self, role: ProcessRole, num_nodes: int = 1) -> Cost:
        """The cost of a role in a deployment with a broker of one node or of three."""
        if role == "broker":
            return self.broker if num_nodes == 1 else self.cluster
        return self.worker if role == "worker" else self.gateway


@cache
def load(path: Path = PATH) -> Costs:
    """The costs in a file."""
    return msgspec.json.decode(path.read_bytes(), type=Costs)
