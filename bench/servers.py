"""Systems while they run: starts them, waits until they are ready, and ends all their processes."""

import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import psutil

from bench.broker import NO_BROKER
from bench.load import MODEL
from bench.systems import Command, System
from tests.support.deployment.processes import free_port

MANY_STREAMS = (
    "--log-level=warning",
    "--max-requests=4096",
)
"""The options of a gateway whose clients open thousands of streams from a single address."""
_READY_TIMEOUT_S = 600
_STOP_TIMEOUT_S = 30
_POLL_S = 0.02


class ServerDied(Exception):
    """A server ended, or was not ready in time. The text is the end of its log."""


@dataclass(frozen=True)
class Server:
    """A running system that answers at ``url``."""

    url: str
    start_s: float
    """Seconds from its start to its first response."""
    roots: Sequence[psutil.Process]
    roles: Mapping[str, psutil.Process]
    """The processes whose CPU time is measured, by their names."""

    def cpu_s(self) -> dict[str, float]:
        """The CPU time of each role since its start, without that of the processes that it has
        started."""
        times = {role: process.cpu_times() for role, process in self.roles.items()}
        return {role: time.user + time.system for role, time in times.items()}

    def peak_memory_bytes(self) -> int:
        """The sum of the peak resident memory of its processes.

        Shared memory counts once for each process. Processes that have already ended do not count.
        """
        return sum(map(_peak_memory_bytes, trees(self.roots)))


@contextmanager
def running(system: System) -> Iterator[Server]:
    """Start ``system`` and end it with the ``with``. Its broker is started before the clock. Raises
    `ServerDied`."""
    port = free_port()
    with ExitStack() as stack:
        broker = stack.enter_context(system.broker()) if system.broker else NO_BROKER
        start = time.perf_counter()
        log = Path(stack.enter_context(TemporaryDirectory(prefix="warren-bench-"))) / "log"
        processes = [
            stack.enter_context(_process(command, system, log))
            for command in system.commands(port, broker.url)
        ]
        url = f"http://127.0.0.1:{port}"
        _wait_until_it_answers(url, processes, log)
        start_s = time.perf_counter() - start
        roles = dict(zip(system.roles, processes, strict=False))
        yield Server(url, start_s, [*processes, *broker.processes], roles)


def wait_served(url: str, model: str) -> None:
    """Return once the gateway at ``url`` lists the model. Raises `TimeoutError`."""
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while model not in httpx.get(f"{url}/v1/models").text:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no worker serves {model}")
        time.sleep(0.1)


def trees(roots: Sequence[psutil.Process]) -> list[psutil.Process]:
    """The processes and all their descendants."""
    return [*roots, *(child for root in roots for child in root.children(recursive=True))]


@contextmanager
def _process(command: Command, system: System, log: Path) -> Iterator[psutil.Popen]:
    with log.open("ab") as output:
        process = psutil.Popen(
            list(command),
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **system.environment},
            # Ctrl-C is handled by the benchmark, which ends its servers in order.
            start_new_session=True,
        )
    try:
        yield process
    finally:
        _end(process)


def _end(process: psutil.Popen) -> None:
    """Terminate a server in order, and kill the processes that do not end."""
    with suppress(psutil.NoSuchProcess):
        tree = trees([process])
        process.terminate()
        psutil.wait_procs([process], timeout=_STOP_TIMEOUT_S)
        for one in tree:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(tree, timeout=_STOP_TIMEOUT_S)


def _wait_until_it_answers(url: str, processes: Sequence[psutil.Popen], log: Path) -> None:
    deadline = time.monotonic() + _READY_TIMEOUT_S
    with httpx.Client(base_url=url, timeout=60) as client:
        while not _answers(client):
            if any(process.poll() is not None for process in processes):
                raise ServerDied(f"died at its start:\n{_end_of(log)}")
            if time.monotonic() > deadline:
                raise ServerDied(f"no answer in {_READY_TIMEOUT_S} s:\n{_end_of(log)}")
            time.sleep(_POLL_S)


def _answers(client: httpx.Client) -> bool:
    """Whether it is healthy, lists a model and completes a prompt."""
    body = {"model": MODEL, "prompt": [1000], "max_tokens": 1}
    try:
        return (
            client.get("/health").status_code == 200
            and bool(client.get("/v1/models").json()["data"])
            and client.post("/v1/completions", json=body).status_code == 200
        )
    except httpx.TransportError:
        return False


def _end_of(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-30:])


def _peak_memory_bytes(process: psutil.Process) -> int:
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(peak[1]) * 1024 if peak else 0
