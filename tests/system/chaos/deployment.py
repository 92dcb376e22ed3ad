"""Gateways and workers over a broker, and every way to disturb these processes."""

import asyncio
import itertools
import os
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple, Self

from tests.support.deployment import processes
from tests.support.deployment.broker import RabbitNode
from tests.support.deployment.processes import WarrenProcess, free_port
from tests.system.chaos.tenants import NOBODY, WEIGHTS, Tenant, create_tenants

Start = Callable[[str, Path], WarrenProcess]

GATEWAY_OPTIONS = (
    "--disconnect-grace-s=20",
    "--request-timeout-s=300",
    "--drain-grace-s=2",
    "--log-level=warning",
)
STALL_S = 9.0
"""Longer than all waiting times, which the broker's URL and `SHORT_SILENCE` shorten."""
SHORT_HEARTBEAT = "?heartbeat=2"
SHORT_RETENTION = {"reply_retention_s": 20.0}
SHORT_SILENCE = {"worker_silence_s": 4.0}
SHORT_GRACE = "--disconnect-grace-s=4"
"""What clients leave behind for good is gone sooner."""
_NOTICE_S = 2.0
"""Clouds take a machine away half a minute or two minutes after their notice."""
_COMPILE_TIMEOUT_S = 180.0
"""For a worker that compiles all kernels for a GPU at its first start."""


class Interruption(NamedTuple):
    """The end of a worker's machine."""

    at_s: float
    """When the cloud gives notice, or takes the machine away without notice."""
    worker: int
    notice_s: float
    """How long the machine lasts after the notice; 0: there is no notice."""


SPOT_TRACE = (
    Interruption(0.0, 0, _NOTICE_S),
    Interruption(4.0, 1, _NOTICE_S),  # two machines of one pool
    Interruption(4.0, 2, _NOTICE_S),
    Interruption(20.0, 0, _NOTICE_S),  # the whole fleet within a second
    Interruption(20.5, 1, _NOTICE_S),
    Interruption(21.0, 2, _NOTICE_S),
    Interruption(36.0, 1, 0.0),  # a machine that fails while another has notice
    Interruption(36.0, 2, _NOTICE_S),
    Interruption(50.0, 0, 0.1),  # too short to hand over
)
"""Machines of one pool often end together, because the cloud needs the capacity at once."""


def mortal_worker(broker: str, log: Path, *options: str) -> WarrenProcess:
    """See `tests.system.chaos.worker`."""
    port = free_port()
    module = "tests.system.chaos.worker"
    notice = f"--interruption-notice={_notice_beside(log)}"
    args = ["-m", module, f"--broker={broker}", f"--health-port={port}", notice, *options]
    return WarrenProcess(args, port, log, {"WARREN_TENANT_WEIGHTS": WEIGHTS})


def _notice_beside(log: Path) -> Path:
    return log.with_suffix(".notice")


def varied_workers(*options: str) -> Start:
    """Workers of SmolLM2, or of the model that the options name. Every other worker uses no
    instructions beyond AVX2: all processors compute the same."""
    limits: Iterator[dict[str, str]] = itertools.cycle(({"ATEN_CPU_CAPABILITY": "avx2"}, {}))

    def start(broker: str, log: Path) -> WarrenProcess:
        more = ("--compute-threads=1", "--stall-timeout-s=20")
        variables = {"WARREN_TENANT_WEIGHTS": WEIGHTS, **next(limits)}
        return processes.worker(broker, log, *options, *more, **variables)

    return start


def random_model_workers(directory: Path) -> Start:
    """Workers of the model in ``directory``, all of them on the device that the environment
    names."""

    def start(broker: str, log: Path) -> WarrenProcess:
        process = processes.worker(
            broker,
            log,
            f"--model={directory}",
            "--dtype=bfloat16",
            "--batch-invariant",
            # They share the memory of a device, and record few graphs.
            "--max-num-seqs=16",
            "--max-num-batched-tokens=256",
            f"--kv-cache-bytes={192 << 20}",
            "--compute-threads=1",
            WARREN_TENANT_WEIGHTS=WEIGHTS,
        )
        process.start_timeout_s = _COMPILE_TIMEOUT_S
        return process

    return start


class Deployment:
    """Restarts every process that it kills."""

    def __init__(
        self,
        logs: Path,
        *,
        worker_url: str,
        gateway_url: str,
        start_worker: Start = mortal_worker,
        num_workers: int = 3,
        num_gateways: int = 2,
        gateway_options: Sequence[str] = (),
        gateway_tuning: Mapping[str, float] | None = None,
        has_keys: bool = False,
    ) -> None:
        """``worker_url`` and ``gateway_url`` are the URLs under which each side reaches the broker.
        ``gateway_tuning``: fields of `gateway.wiring.Tuning`. ``has_keys``: whether the gateways
        demand the keys of ``tenants``."""
        self.data_dir = logs / "data"
        """Files and database of all gateways."""
        self.tenants: Sequence[Tenant] = [NOBODY]
        if has_keys:
            self.tenants = create_tenants(logs / "keys")
            gateway_options = [*gateway_options, f"--keys-file={logs / 'keys'}"]
        names = itertools.count()
        secret = secrets.token_hex(16)

        def new_gateway() -> WarrenProcess:
            log = logs / f"gateway{next(names)}"
            options = [*GATEWAY_OPTIONS, f"--data-dir={self.data_dir}", *gateway_options]
            tuning = {**SHORT_RETENTION, **(gateway_tuning or {})}
            return processes.gateway(
                gateway_url, log, *options, tuning=tuning, WARREN_SECRET=secret
            )

        self.workers = [
            start_worker(worker_url, logs / f"worker{next(names)}") for _ in range(num_workers)
        ]
        self.gateways = [new_gateway() for _ in range(num_gateways)]

    async def __aenter__(self) -> Self:
        try:
            for process in self.processes:
                process.start()
            for process in self.processes:
                await asyncio.to_thread(process.wait_healthy)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in (*self.gateways, *self.workers):
            if process.is_alive:
                os.kill(process.pid, signal.SIGCONT)
            await asyncio.to_thread(process.terminate)

    @property
    def processes(self) -> list[WarrenProcess]:
        return [*self.workers, *self.gateways]

    def urls(self) -> list[str]:
        return [gateway.url for gateway in self.gateways]

    async def kill_worker(self, worker: WarrenProcess | None = None) -> None:
        """Kill ``worker``, or each in turn."""
        await _replace(worker or _next(self.workers), WarrenProcess.kill)

    async def drain_worker(self) -> None:
        await _replace(_next(self.workers), WarrenProcess.terminate)

    async def kill_gateway(self) -> None:
        await _replace(_next(self.gateways), WarrenProcess.kill)

    async def drain_gateway(self) -> None:
        await _replace(_next(self.gateways), WarrenProcess.terminate)

    async def kill_worker_and_gateway(self) -> None:
        await asyncio.gather(self.kill_worker(), self.kill_gateway())

    async def lose_power(self, node: RabbitNode) -> None:
        """Kill all processes and the broker at once, and start them again."""
        deaths = [node.kill, *(process.kill for process in self.processes)]
        await asyncio.gather(*map(asyncio.to_thread, deaths))
        await asyncio.to_thread(node.start)
        for process in self.processes:
            process.start()
        for process in self.processes:
            await asyncio.to_thread(process.wait_healthy)

    async def reclaim_machine(self) -> None:
        """Give a worker notice that its machine ends, and kill the worker a moment later, whether
        it has ended or not."""
        await _reclaim(_next(self.workers), _NOTICE_S)

    async def replay(self, trace: Sequence[Interruption]) -> None:
        """Take the machines of workers away at the times of a trace."""
        machines = [(worker, asyncio.Lock()) for worker in self.workers]

        async def interrupt(at_s: float, worker: int, notice_s: float) -> None:
            await asyncio.sleep(at_s)
            process, is_starting = machines[worker]
            async with is_starting:
                await _reclaim(process, notice_s)

        async with asyncio.TaskGroup() as interruptions:
            for one in trace:
                interruptions.create_task(interrupt(*one))

    async def stall_worker(self) -> None:
        """Stop it for longer than all waiting times, then let it continue beside its
        replacement."""
        worker = _next(self.workers)
        os.kill(worker.pid, signal.SIGSTOP)
        await asyncio.sleep(STALL_S)
        os.kill(worker.pid, signal.SIGCONT)
        await asyncio.to_thread(_revive, worker)

    @asynccontextmanager
    async def supervised(self) -> AsyncIterator["Deaths"]:
        """Restart the workers that die of a request."""
        deaths = Deaths()
        supervisor = asyncio.create_task(self._supervise(deaths))
        try:
            yield deaths
        finally:
            supervisor.cancel()
            for worker in self.workers:
                await asyncio.to_thread(_revive, worker)

    async def _supervise(self, deaths: "Deaths") -> None:
        while True:
            await asyncio.sleep(0.05)
            for worker in self.workers:
                if not worker.is_alive:
                    deaths.num += 1
                    worker.start()


class Deaths:
    """The number of restarts."""

    num = 0


async def _reclaim(worker: WarrenProcess, notice_s: float) -> None:
    """Without a notice if ``notice_s`` is 0. The worker starts again on another machine."""
    notice = _notice_beside(worker.log_path)
    if notice_s:
        notice.touch()
        await asyncio.sleep(notice_s)
    await asyncio.to_thread(worker.kill)
    notice.unlink(missing_ok=True)
    await asyncio.to_thread(_revive, worker)


async def _replace(process: WarrenProcess, end: Callable[[WarrenProcess], object]) -> None:
    await asyncio.to_thread(end, process)
    process.start()
    await asyncio.to_thread(process.wait_healthy)


def _next(several: list[WarrenProcess]) -> WarrenProcess:
    """Returns each in turn."""
    several.append(several.pop(0))
    return several[-1]


def _revive(worker: WarrenProcess) -> None:
    """A watchdog may have ended it when it continued; an orchestrator would restart it."""
    if not worker.is_alive:
        worker.start()
    worker.wait_healthy()
