"""A broker, gateways and synthetic workers, and the CPU time and memory of each kind of process."""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from bench.other_load import OtherLoad
from bench.servers import MANY_STREAMS, trees, wait_served
from tests.support.deployment import processes
from tests.support.deployment.broker import RabbitNode, running_cluster, running_node
from tests.support.deployment.processes import WarrenProcess

MODEL = "echo"
_STARTED_AT_ONCE = 2
_SETTLED_AFTER_S = 2.0
"""Without an end of a process, of which each stream has several."""
_SETTLING_STEP_S = 0.25
_VOLUNTARY = re.compile(r"^voluntary_ctxt_switches:\s+(\d+)$", re.MULTILINE)
_GATEWAY = (
    *MANY_STREAMS,
    "--max-queue-wait-s=3600",
    "--disconnect-grace-s=0",  # what users leave behind does not run beside the next measurement
)


@dataclass(frozen=True, kw_only=True)
class Used:
    """What the processes used in a time."""

    seconds: float
    cores: Mapping[str, float]
    """By role; that of the benchmark itself is ``client``."""
    wakeups_per_s: Mapping[str, float]
    """See `bench.fleet.point.Point`."""
    others: float
    """Cores that processes outside of the benchmark used."""


class Deployment:
    """Processes that can be added while it runs."""

    def __init__(self, nodes: Sequence[RabbitNode], url: str, stack: ExitStack) -> None:
        self.nodes = nodes
        self.workers: list[WarrenProcess] = []
        self.gateways: list[WarrenProcess] = []
        self.url = url
        self._stack = stack
        self._logs = Path(stack.enter_context(TemporaryDirectory(prefix="warren-fleet-")))

    @property
    def urls(self) -> Sequence[str]:
        """The URLs of the gateways."""
        return [gateway.url for gateway in self.gateways]

    def add_gateways(self, num_gateways: int) -> None:
        for _ in range(num_gateways):
            log = self._logs / f"gateway-{len(self.gateways)}"
            gateway = processes.gateway(self.url, log, *_GATEWAY)
            self.gateways.append(self._stack.enter_context(gateway))

    def add_workers(
        self,
        num_workers: int,
        *,
        step_s: float,
        num_slots: int,
        is_clock: bool = False,
        is_paced: bool = False,
    ) -> None:
        """Start workers, a few at once, and wait until all are healthy and a gateway lists their
        model. Workers with a clock, and workers that are ``is_paced``, pace events as real workers
        do; for other workers each token is an event."""
        variables = {
            "WARREN_LOG_LEVEL": "warning",
            "WARREN_MAX_NUM_SEQS": str(num_slots),
            "WARREN_MAX_NUM_BATCHED_TOKENS": str(max(512, 4 * num_slots)),
            "WARREN_STALL_TIMEOUT_S": "300",
            "WARREN_DRAIN_GRACE_S": "5",
        }
        options = [f"--step-ms={1e3 * step_s}"]
        if is_clock:
            options.append("--clock")
        elif not is_paced:
            options.append('--tuning={"stream_events_per_s": 1e6}')
        while num_workers:
            group: list[WarrenProcess] = []
            for _ in range(min(num_workers, _STARTED_AT_ONCE)):
                log = self._logs / f"worker-{len(self.workers) + len(group)}"
                group.append(processes.echo_worker(self.url, log, *options, **variables))
                group[-1].start()
                self._stack.callback(_end, group[-1])
            for worker in group:
                worker.wait_healthy()
            self.workers += group
            num_workers -= len(group)
        wait_served(self.urls[-1], MODEL)

    def end_worker(self) -> None:
        """Stop the worker that was started first, as an orchestrator would."""
        self.workers.pop(0).terminate()

    def memory_bytes(self) -> Mapping[str, int]:
        """Resident memory, by role."""
        return {
            role: sum(one.memory_info().rss for one in several)
            for role, several in self._processes().items()
        }

    def cpu_s(self) -> Mapping[str, float]:
        """The CPU time so far, by role."""
        times = {
            role: [one.cpu_times() for one in several]
            for role, several in self._processes().items()
        }
        return {role: sum(one.user + one.system for one in all_) for role, all_ in times.items()}

    def num_wakeups(self) -> Mapping[str, int]:
        """The wake-ups so far of the threads that run, by role."""
        return {
            role: sum(_num_wakeups(one.pid) for one in several)
            for role, several in self._processes().items()
        }

    def num_erlang_processes(self) -> int:
        """The processes that the nodes of the broker run. Those of the streams that have just ended
        may still be among them."""
        count = "erlang:system_info(process_count)"
        return sum(int(node.evaluate(count)) for node in self.nodes)

    def wait_settled(self) -> None:
        """Wait until the broker has ended the processes of the streams that ended before."""
        fewest, deadline = self.num_erlang_processes(), time.monotonic() + _SETTLED_AFTER_S
        while (now := time.monotonic()) < deadline:
            time.sleep(_SETTLING_STEP_S)
            if (count := self.num_erlang_processes()) < fewest:
                fewest, deadline = count, now + _SETTLED_AFTER_S

    def _processes(self) -> Mapping[str, Sequence[psutil.Process]]:
        return {
            "worker": trees([psutil.Process(one.pid) for one in self.workers]),
            "broker": [psutil.Process(node.pid) for node in self.nodes],
            "gateway": trees([psutil.Process(one.pid) for one in self.gateways]),
            "client": [psutil.Process()],
        }


class Meter:
    """Measures what is used from its creation on."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._others = OtherLoad()
        self._start = time.monotonic()
        self._cpu_s = deployment.cpu_s()
        self._num_wakeups = deployment.num_wakeups()

    def read(self) -> Used:
        seconds = time.monotonic() - self._start
        cpu_s, num_wakeups = self._deployment.cpu_s(), self._deployment.num_wakeups()
        return Used(
            seconds=seconds,
            cores={role: (cpu_s[role] - self._cpu_s[role]) / seconds for role in cpu_s},
            wakeups_per_s={
                role: (num_wakeups[role] - self._num_wakeups[role]) / seconds
                for role in num_wakeups
            },
            others=self._others.cores(),
        )


@contextmanager
def deployed(*, num_nodes: int, num_gateways: int) -> Iterator[Deployment]:
    """Run a broker of its own and gateways, and everything that is added, until the end of the
    ``with``."""
    with ExitStack() as stack:
        if num_nodes == 1:
            node = stack.enter_context(running_node())
            deployment = Deployment([node], node.url, stack)
        else:
            cluster = stack.enter_context(running_cluster(num_nodes))
            deployment = Deployment(cluster.nodes, cluster.url, stack)
        deployment.add_gateways(num_gateways)
        yield deployment


def _num_wakeups(pid: int) -> int:
    """The voluntary context switches of a process."""
    found = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found += sum(map(int, _VOLUNTARY.findall(status.read_text())))
    return found


def _end(worker: WarrenProcess) -> None:
    if worker.is_alive:
        worker.kill()
