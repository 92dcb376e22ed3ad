"""Checks that a deployment returns to its initial state."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import httpx
import psutil

from tests.support.deployment.broker import RabbitNode
from tests.support.deployment.processes import NO_TLS, WarrenProcess
from tests.system.chaos.deployment import Deployment

MORE_DESCRIPTORS = 20
"""File descriptors that a process may have in addition: a connection to SQLite has three, and a
gateway opens a connection for each transaction that runs beside others."""
MORE_MEMORY_BYTES = 48 << 20
"""Memory that a process may have in addition, because allocators keep the memory of busy
moments."""

_PATIENCE_S = 120
"""A node that has lost another node may answer nothing for a minute. Until then it keeps the queues
of clients that have left it, with the messages that arrive in them."""
_LOOK_INTERVAL_S = 2.0
"""A check takes a second of CPU time, because it starts the broker's command-line tool."""
PROBES = "reply.probe-"
"""Queues with which gateways look whether logs have lost their bindings."""
_OWN_QUEUES = ("control.", "workers.")
_BUSY = (
    "warren_worker_sequences_running",
    "warren_worker_sequences_waiting",
    "warren_worker_kv_cache_usage_ratio",
)


@dataclass(frozen=True)
class Usage:
    """The resources of a process."""

    num_descriptors: int
    memory_bytes: int

    @classmethod
    def of(cls, pid: int) -> "Usage":
        process = psutil.Process(pid)
        return cls(process.num_fds(), process.memory_info().rss)


def usages(processes: Iterable[WarrenProcess]) -> dict[int, Usage]:
    """By process id."""
    return {process.pid: Usage.of(process.pid) for process in processes}


def wait_clean(
    node: RabbitNode,
    deployment: Deployment,
    before: dict[int, Usage],
    *,
    log_retention_s: float = 0.0,
) -> None:
    """Wait until no job, delivery, log (except spare logs) and block remains, and each process that
    existed ``before`` uses little more than then. Raises `AssertionError` after two minutes, or as
    much later as logs without a reader last."""
    empty: set[str] = set()
    _wait_for_nothing(lambda: _in_queues(node, empty), _PATIENCE_S + log_retention_s)
    _wait_for_nothing(lambda: [line for w in deployment.workers for line in _in_engine(w)])
    _wait_for_nothing(lambda: _grown(before, deployment))


def _wait_for_nothing(look: Callable[[], list[str]], patience_s: float = _PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while left := look():
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(_LOOK_INTERVAL_S)


def _in_queues(node: RabbitNode, empty: set[str]) -> list[str]:
    """``empty`` collects the queues that were seen empty. Something comes into the processes' own
    queues every second, which may be on its way at every look."""
    columns = ("name", "messages_ready", "messages_unacknowledged", "consumers")
    try:
        rows = node.list_queues(*columns)
    except AssertionError as error:  # the node has just been started, and does not answer yet
        return [str(error)]
    left = []
    for name, ready, unacknowledged, consumers in rows:
        if not ready.isdigit() or name == "jobs.dead":
            continue
        if name.startswith(PROBES) and int(ready) <= 1:  # each gateway has one, which is full
            continue
        is_spare_log = name.startswith("reply.") and consumers == "1"
        is_used = bool(int(ready) + int(unacknowledged))
        if not is_used:
            empty.add(name)
        elif name in empty and name.startswith(_OWN_QUEUES):
            continue
        if is_used or (name.startswith("reply.") and not is_spare_log):
            left.append(f"{name}: {ready} ready, {unacknowledged} in hands")
    return left


def _in_engine(worker: WarrenProcess) -> list[str]:
    try:
        lines = httpx.get(f"{worker.url}/metrics", timeout=60, verify=NO_TLS).text.splitlines()
    except httpx.TransportError as error:  # it may just be starting
        return [f"{worker.url}: {error!r}, alive: {worker.is_alive}"]
    return [
        f"{worker.url}: {line}"
        for line in lines
        if line.split("{")[0] in _BUSY and float(line.split()[-1]) > 0
    ]


def _grown(before: dict[int, Usage], deployment: Deployment) -> list[str]:
    left = []
    for pid, now in usages(deployment.processes).items():
        then = before.get(pid, now)
        descriptors = now.num_descriptors - then.num_descriptors
        memory_bytes = now.memory_bytes - then.memory_bytes
        if descriptors > MORE_DESCRIPTORS or memory_bytes > MORE_MEMORY_BYTES:
            left.append(f"{pid}: {descriptors} descriptors, {memory_bytes >> 20} MiB more")
    return left
