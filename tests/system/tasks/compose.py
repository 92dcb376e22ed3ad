"""Docker Compose's commands, as far as docs/tasks.md uses them, for a deployment of processes:
tests have no container engine.

``python -m tests.system.tasks.compose compose ...`` takes the place of ``docker compose ...``. The
deployment is a directory, which ``WARREN_TEST_DEPLOYMENT`` names: its workers are ``worker-N.json``
with the logs ``worker-N.log``, and the gateway's log is ``gateway.log``.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from tests.support.deployment import processes

DIRECTORY = "WARREN_TEST_DEPLOYMENT"
BROKER = "worker.url"
"""The file with the URL of the broker for workers."""
KEYS = "keys"


class Deployment:
    """Workers of the synthetic model, which outlive the process that starts them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def workers(self) -> dict[str, int]:
        """The URLs of the workers that run, oldest first, and the ids of their processes."""
        states = [json.loads(path.read_text()) for path in self._states()]
        return {state["url"]: state["pid"] for state in states if _runs(state["pid"])}

    def scale(self, num_workers: int) -> None:
        """Start workers, or end the newest workers and wait for them."""
        pids = list(self.workers().values())
        for pid in pids[num_workers:]:
            os.kill(pid, signal.SIGTERM)
        for _ in range(num_workers - len(pids)):
            self._start(len(self._states()))
        psutil.wait_procs([psutil.Process(pid) for pid in pids[num_workers:] if _runs(pid)])

    def log(self) -> str:
        """The lines of all processes."""
        return "".join(path.read_text() for path in sorted(self.directory.glob("*.log")))

    def run_with_keys(self, command: str) -> int:
        variables = {**os.environ, "WARREN_KEYS_FILE": str(self.directory / KEYS)}
        return subprocess.run(["sh", "-c", command], env=variables).returncode

    def _states(self) -> list[Path]:
        return sorted(self.directory.glob("worker-*.json"))

    def _start(self, number: int) -> None:
        broker = (self.directory / BROKER).read_text()
        log = self.directory / f"worker-{number}.log"
        worker = processes.echo_worker(broker, log, "--step-ms=10")
        worker.start()
        log.with_suffix(".json").write_text(json.dumps({"url": worker.url, "pid": worker.pid}))


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(prog="docker")
    commands = (
        parser.add_subparsers(required=True)
        .add_parser("compose")
        .add_subparsers(required=True, dest="command")
    )
    logs = commands.add_parser("logs")
    logs.add_argument("--no-log-prefix", action="store_true", required=True)
    logs.add_argument("services", nargs="+")
    run = commands.add_parser("run")
    run.add_argument("--rm", action="store_true", required=True)
    run.add_argument("--no-TTY", action="store_true", required=True)
    run.add_argument("service", choices=["keys"])
    run.add_argument("shell_command")
    up = commands.add_parser("up")
    up.add_argument("--detach", action="store_true", required=True)
    up.add_argument("--no-recreate", action="store_true", required=True)
    up.add_argument("--scale", required=True)
    given = parser.parse_args()

    deployment = Deployment(Path(os.environ[DIRECTORY]))
    if given.command == "logs":
        sys.stdout.write(deployment.log())
    elif given.command == "run":
        return deployment.run_with_keys(given.shell_command)
    else:
        deployment.scale(int(given.scale.removeprefix("worker=")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
