"""A load of a deployment, and what it took."""

from collections.abc import Mapping
from dataclasses import dataclass

from bench.fleet.deployment import Deployment, Used
from bench.fleet.users import Received

NOTHING = Received(tokens_per_s=0.0, events_per_s=0.0, requests_per_s=0.0, ttft_p50_ms=0.0)


@dataclass(frozen=True, kw_only=True)
class Point:
    """A load, and the cores that it took."""

    num_nodes: int
    num_gateways: int
    num_workers: int
    answer_tokens: int
    """0 without load."""
    received: Received
    cores: Mapping[str, float]
    wakeups_per_s: Mapping[str, float]
    """How often the threads of all processes of a role began to run because something happened that
    they had waited for."""
    others: float


def point_of(
    deployment: Deployment, used: Used, answer_tokens: int = 0, received: Received = NOTHING
) -> Point:
    return Point(
        num_nodes=len(deployment.nodes),
        num_gateways=len(deployment.gateways),
        num_workers=len(deployment.workers),
        answer_tokens=answer_tokens,
        received=received,
        cores=used.cores,
        wakeups_per_s=used.wakeups_per_s,
        others=used.others,
    )
