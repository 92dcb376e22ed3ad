"""Workers whose engine is a real server of another kind, and every way to disturb the server."""

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import psutil

from tests.support.deployment import processes
from tests.support.deployment.processes import NO_TLS, WarrenProcess, free_port
from tests.support.engines.real_servers import RealEngine
from tests.system.chaos.deployment import Deployment, Start
from tests.system.chaos.tenants import WEIGHTS
from worker.engines.adapters import ADAPTERS

MODEL = "smollm2"
STOP_S = 15.0
"""Longer than a worker waits for the answers to two health checks."""
_MAX_SEQ_LEN = 512
_NUM_SLOTS = 8
_BACK_WITHIN_S = 150.0
"""Including the longest pause before an engine is started again."""
_LOOK_INTERVAL_S = 0.2


def engine_workers(engine: RealEngine, model: Path) -> Start:
    """Workers that start a server each."""

    def start(broker: str, log: Path) -> WarrenProcess:
        options = engine.options(model, free_port(), max_seq_len=_MAX_SEQ_LEN, num_slots=_NUM_SLOTS)
        given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        return processes.worker(
            broker,
            log,
            f"--model={model}",
            f"--served-name={MODEL}",
            "--stall-timeout-s=20",
            *given,
            WARREN_TENANT_WEIGHTS=WEIGHTS,
        )

    return start


class EngineFaults:
    """Disturbs the engines of a deployment's workers, each in turn."""

    def __init__(self, deployment: Deployment, engine: RealEngine) -> None:
        self._deployment = deployment
        self._engine = engine
        self._turn = 0

    async def kill_engine(self) -> None:
        """End a server at once, as the kernel does when memory runs out; returns when the worker
        has started it again."""
        server = self._next_server()
        url = _url_of(server)
        server.kill()
        await self._wait_healthy(url)

    async def stop_engine(self) -> None:
        """Let a server hang, and go on after its worker has given its jobs away."""
        server = self._next_server()
        server.send_signal(signal.SIGSTOP)
        await asyncio.sleep(STOP_S)
        server.send_signal(signal.SIGCONT)
        await self._wait_healthy(_url_of(server))

    def wake_all(self) -> None:
        """Let every server continue, so that each can end."""
        for worker in self._deployment.workers:
            for server in _servers_of(worker, self._engine):
                os.kill(server.pid, signal.SIGCONT)

    def _next_server(self) -> psutil.Process:
        workers = self._deployment.workers
        self._turn += 1
        (server,) = _servers_of(workers[self._turn % len(workers)], self._engine)
        return server

    async def _wait_healthy(self, url: str) -> None:
        path = ADAPTERS[self._engine.name].health_path
        deadline = time.monotonic() + _BACK_WITHIN_S
        async with httpx.AsyncClient(verify=NO_TLS) as client:
            while not await _is_healthy(client, f"{url}{path}"):
                assert time.monotonic() < deadline, f"{url} is not back"
                await asyncio.sleep(_LOOK_INTERVAL_S)


async def _is_healthy(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(url)).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def _servers_of(worker: WarrenProcess, engine: RealEngine) -> Sequence[psutil.Process]:
    """The processes of a worker's engine that listen, without the processes that they have
    started."""
    below = psutil.Process(worker.pid).children(recursive=True)
    program = Path(engine.program).name
    return [process for process in below if program in _names_of(process)][:1]


def _names_of(process: psutil.Process) -> Sequence[str]:
    """The names of a process's program and, if an interpreter runs it, of its script."""
    return [Path(word).name for word in process.cmdline()[:2]]


def _url_of(server: psutil.Process) -> str:
    words = server.cmdline()
    return f"http://127.0.0.1:{words[words.index('--port') + 1]}"
