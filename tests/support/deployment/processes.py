"""Starts and stops Warren's real processes."""

import json
import os
import secrets
import signal
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import httpx

from tests.support.deployment.forking.client import Process, start, started

ROOT = Path(__file__).parents[3]
START_TIMEOUT_S = 240
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For clients that never use TLS: loading the certificates takes each of them 45 ms."""


_PORTS = range(10_000, 32_000)
"""Outside the range from which the system assigns ports."""
_given: set[int] = set()
"""A process that was killed may start again at its port, which nobody else must get meanwhile."""


def free_port() -> int:
    """A port on which nobody listens. This process gets it only once, and the other processes of
    the test run never."""
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    own = _PORTS[number :: int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))]
    while True:
        port = secrets.choice(own)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            if port not in _given:
                _given.add(port)
                return port


class WarrenProcess:
    """``python ARGS`` in the repository's root, healthy once its port answers ``/health``."""

    def __init__(
        self,
        args: Sequence[str],
        port: int,
        log: Path,
        variables: Mapping[str, str] | None = None,
        root: Path = ROOT,
    ) -> None:
        """``root`` may be the sources of another version."""
        self.url = f"http://127.0.0.1:{port}"
        self.start_timeout_s: float = START_TIMEOUT_S
        self.may_be_copy = True
        """Whether tests may run a copy of a process that has imported the modules."""
        self._args = args
        self.log_path = log
        self._variables = variables or {}
        self._root = root
        self._process: Process | None = None

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait_healthy()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.terminate()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def start(self) -> None:
        with self.log_path.open("ab") as log:
            variables = {**os.environ, "WARREN_LOG_FORMAT": "json", **self._variables}
            begin = start if self.may_be_copy else started
            self._process = begin(self._args, cwd=self._root, env=variables, log=log)

    def wait_healthy(self) -> None:
        deadline = time.monotonic() + self.start_timeout_s
        with httpx.Client(verify=NO_TLS) as client:
            while time.monotonic() < deadline:
                assert self._process is not None
                assert self._process.poll() is None, f"died at its start:\n{self.log}"
                with suppress(httpx.TransportError):
                    if client.get(f"{self.url}/health").status_code == 200:
                        return
                time.sleep(0.05)
        raise AssertionError(f"not healthy after {self.start_timeout_s} s:\n{self.log}")

    def kill(self) -> None:
        """End the process at once, as a power cut would."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def wait(self) -> int:
        """The exit code of a process that ends by itself."""
        assert self._process is not None
        return self._process.wait(timeout=START_TIMEOUT_S)

    def terminate(self) -> int:
        """End the process as an orchestrator would; returns the exit code."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.terminate()
        return self._process.wait(timeout=START_TIMEOUT_S)


def serve(log: Path, *options: str) -> WarrenProcess:
    """``warren serve``: everything in a single process."""
    port = free_port()
    return WarrenProcess(["warren.py", "serve", f"--port={port}", *options], port, log)


def gateway(
    broker: str,
    log: Path,
    *options: str,
    root: Path = ROOT,
    tuning: Mapping[str, float] | None = None,
    **variables: str,
) -> WarrenProcess:
    """``tuning``: fields of `gateway.wiring.Tuning`."""
    port = free_port()
    command = ["warren.py", "gateway"]
    if tuning is not None:
        command = ["-m", "tests.support.tuning.gateway", f"--tuning={json.dumps(tuning)}"]
    args = [*command, f"--broker={broker}", f"--port={port}", *options]
    return WarrenProcess(args, port, log, variables, root)


def worker(broker: str, log: Path, *options: str, **variables: str) -> WarrenProcess:
    port = free_port()
    args = ["warren.py", "worker", f"--broker={broker}", f"--health-port={port}", *options]
    return WarrenProcess(args, port, log, variables)


def echo_worker(broker: str, log: Path, *options: str, **variables: str) -> WarrenProcess:
    """A worker with a synthetic model: see `bench.echo_worker`."""
    return echo_worker_of(ROOT, broker, log, *options, **variables)


def echo_worker_of(
    root: Path, broker: str, log: Path, *options: str, **variables: str
) -> WarrenProcess:
    """An `echo_worker` of the sources in ``root``."""
    port = free_port()
    args = ["-m", "bench.echo_worker", f"--broker={broker}", f"--health-port={port}", *options]
    return WarrenProcess(args, port, log, variables, root)
