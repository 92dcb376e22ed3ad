"""Plays pods of rendered manifests as processes: their variables, Secrets, probes and end."""

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from tests.support.deployment.helm import Manifest, container_of, variables_of
from tests.support.deployment.processes import ROOT, free_port

_PORTS = {"http": "WARREN_PORT", "health": "WARREN_HEALTH_PORT"}
"""The variables that hold the containers' ports. Each process gets a port of its own, because all
pods share an address here."""


class Pod:
    """A pod of a deployment, as a process. It ends when its ``async with`` or ``with`` ends."""

    def __init__(
        self,
        deployment: Manifest,
        directory: Path,
        secrets: Mapping[str, str],
        others: Mapping[str, str] | None = None,
    ) -> None:
        """``secrets`` are the contents of the mounted files by their paths in the container;
        ``others`` are variables that the cluster injects."""
        self._container = container_of(deployment)
        self._spec = deployment["spec"]["template"]["spec"]
        self.port = free_port()
        (port,) = self._container["ports"]
        variables = {**variables_of(deployment), _PORTS[port["name"]]: str(self.port)}
        for path, content in secrets.items():
            file = directory / path.replace("/", "_")
            file.write_text(content)
            places = {path: str(file), f"file:{path}": f"file:{file}"}
            variables = {name: places.get(value, value) for name, value in variables.items()}
        self._log = (directory / f"pod-{self.port}.log").open("ab")
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "warren.py"), *self._container["args"]],
            cwd=directory,
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, **(others or {}), **variables},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def passes(self, probe: str) -> bool:
        """Whether a probe succeeds now, as the kubelet sees it."""
        get: dict[str, Any] = self._container[probe]["httpGet"]
        try:
            with urllib.request.urlopen(f"{self.url}{get['path']}", timeout=10) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def wait(self, probe: str) -> None:
        """Wait until a probe succeeds."""
        while not self.passes(probe):
            assert self.is_running, Path(self._log.name).read_text()
            time.sleep(0.1)

    def terminate(self) -> None:
        """Send SIGTERM, as the kubelet does after the preStop hook."""
        self._process.send_signal(signal.SIGTERM)

    def wait_ended(self) -> int:
        """The exit status, which must come within the pod's grace period."""
        return self._process.wait(self._spec["terminationGracePeriodSeconds"])
