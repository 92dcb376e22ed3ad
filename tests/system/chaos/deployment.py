"""Gateways, workers and a broker of their own, and every way to harm them."""

import asyncio
import itertools
import os
import secrets
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Self

from tests.support import processes
from tests.support.broker import RabbitNode
from tests.support.processes import WarrenProcess, free_port

Start = Callable[[str, Path], WarrenProcess]

GATEWAY_OPTIONS = (
    "--reply-retention-s=20",
    "--disconnect-grace-s=20",
    "--request-timeout-s=300",
    "--drain-grace-s=2",
    "--log-level=warning",
)


def mortal_worker(broker: str, log: Path) -> WarrenProcess:
    """See `tests.system.chaos.worker`."""
    port = free_port()
    module = "tests.system.chaos.worker"
    args = ["-m", module, f"--broker={broker}", f"--health-port={port}"]
    return WarrenProcess(args, port, log)


def smollm2_worker(broker: str, log: Path) -> WarrenProcess:
    return processes.worker(
        broker, log, "--dtype=float32", "--compute-threads=1", "--stall-timeout-s=20"
    )


class Deployment:
    """``num_workers`` and ``num_gateways`` over ``node``; who is killed is replaced."""

    def __init__(
        self,
        node: RabbitNode,
        logs: Path,
        *,
        start_worker: Start = mortal_worker,
        num_workers: int = 3,
        num_gateways: int = 2,
        amqp_url: str | None = None,
    ) -> None:
        self.node = node
        self._logs = logs
        self._url = amqp_url or node.url
        self._start_worker = start_worker
        self._numbers = itertools.count()
        self._secret = secrets.token_hex(16)
        self.workers = [self._new_worker() for _ in range(num_workers)]
        self.gateways = [self._new_gateway() for _ in range(num_gateways)]

    async def __aenter__(self) -> Self:
        for process in (*self.workers, *self.gateways):
            process.start()
        for process in (*self.workers, *self.gateways):
            await asyncio.to_thread(process.wait_healthy)
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in (*self.gateways, *self.workers):
            os.kill(process.pid, signal.SIGCONT)
            await asyncio.to_thread(process.terminate)

    def urls(self) -> list[str]:
        return [gateway.url for gateway in self.gateways]

    async def kill_worker(self) -> None:
        await self._replace_worker(lambda worker: asyncio.to_thread(worker.kill))

    async def drain_worker(self) -> None:
        await self._replace_worker(lambda worker: asyncio.to_thread(worker.terminate))

    async def kill_gateway(self) -> None:
        await self._restart_gateway(lambda gateway: asyncio.to_thread(gateway.kill))

    async def drain_gateway(self) -> None:
        await self._restart_gateway(lambda gateway: asyncio.to_thread(gateway.terminate))

    async def kill_worker_and_gateway(self) -> None:
        await asyncio.gather(self.kill_worker(), self.kill_gateway())

    async def stall_worker(self) -> None:
        """Stop it for longer than anybody waits, then let it wake among its successors."""
        worker = self._rotate(self.workers)
        os.kill(worker.pid, signal.SIGSTOP)
        await asyncio.sleep(18)
        os.kill(worker.pid, signal.SIGCONT)
        await asyncio.to_thread(self._revive, worker)

    async def restart_broker(self) -> None:
        await asyncio.to_thread(self.node.stop)
        await asyncio.to_thread(self.node.start)

    async def kill_broker(self) -> None:
        await asyncio.to_thread(self.node.kill)
        await asyncio.to_thread(self.node.start)

    def _revive(self, worker: WarrenProcess) -> None:
        """A watchdog may have ended it when it woke: then an orchestrator starts it again."""
        if not worker.is_alive:
            worker.start()
        worker.wait_healthy()

    async def _replace_worker(self, end: Callable[[WarrenProcess], Awaitable[object]]) -> None:
        worker = self._rotate(self.workers)
        await end(worker)
        worker.start()
        await asyncio.to_thread(worker.wait_healthy)

    async def _restart_gateway(self, end: Callable[[WarrenProcess], Awaitable[object]]) -> None:
        gateway = self._rotate(self.gateways)
        await end(gateway)
        gateway.start()
        await asyncio.to_thread(gateway.wait_healthy)

    def _rotate(self, processes: list[WarrenProcess]) -> WarrenProcess:
        """Each in turn."""
        chosen = processes.pop(0)
        processes.append(chosen)
        return chosen

    def _new_worker(self) -> WarrenProcess:
        return self._start_worker(self._url, self._logs / f"worker{next(self._numbers)}")

    def _new_gateway(self) -> WarrenProcess:
        log = self._logs / f"gateway{next(self._numbers)}"
        port = free_port()
        args = ["warren.py", "gateway", f"--broker={self._url}", f"--port={port}"]
        return WarrenProcess([*args, *GATEWAY_OPTIONS], port, log, {"WARREN_SECRET": self._secret})
