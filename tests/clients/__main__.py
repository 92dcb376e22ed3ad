"""Run the clients that applications use, unmodified, against real deployments of Warren.

    python -m tests.clients [CLIENT ...] [--deployment serve|rabbitmq] [--vllm VLLM]

Each client is installed into an environment of its own under ``--directory`` the first time (with
pip or npm; lm-eval and guidellm also install torch). Logs are written there, too. Node, npm and
Chromium must be installed; vLLM is the command in ``PATH`` or of ``--vllm`` (see bench/README.md).
RabbitMQ is a node that ends with the run, or the one of ``WARREN_TEST_AMQP_URL``. If it is not
installed, use ``infra/rabbitmq/with_rabbitmq.sh python -m tests.clients``.

Prints a line for each check. The exit code is 0 if every client ran and all its checks passed.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from tests.clients.catalog import CLIENTS, ROOT, Missing, Program
from tests.clients.checks import FAILED, OK, Target
from tests.clients.deployments import DEPLOYMENTS

_DIRECTORY = Path.home() / ".cache" / "warren" / "clients"
_TIMEOUT_S = 600


def main(
    clients: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(CLIENTS)}.")] = None,
    deployment: Annotated[list[str] | None, typer.Option(help="serve, rabbitmq.")] = None,
    directory: Annotated[Path, typer.Option(help="Of environments and logs.")] = _DIRECTORY,
    vllm: Annotated[Path | None, typer.Option(help="The command, where PATH lacks it.")] = None,
) -> None:
    chosen, deployments = clients or list(CLIENTS), deployment or list(DEPLOYMENTS)
    for name in {*chosen} - {*CLIENTS} | {*deployments} - {*DEPLOYMENTS}:
        raise typer.BadParameter(f"there is no {name}")
    if vllm is not None:
        os.environ["PATH"] += f":{vllm.absolute().parent}"
    prepared = {name: _prepared(name, directory) for name in chosen}
    programs = {name: program for name, program in prepared.items() if program is not None}
    verdicts = [False] * (len(prepared) - len(programs))
    for where in deployments if programs else []:
        with DEPLOYMENTS[where](directory / where) as target:
            for name, program in programs.items():
                log = directory / where / f"{name}.log"
                label = f"{where:<8}  {name} {program.version}"
                verdicts += _passed(label, program, target, log)
    print(f"{sum(verdicts)} of {len(verdicts)} passed")
    raise SystemExit(not all(verdicts))


def _prepared(name: str, directory: Path) -> Program | None:
    try:
        return CLIENTS[name](directory.absolute() / name)
    except Missing as missing:
        _show(name, "missing", "", str(missing))
        return None


def _passed(label: str, program: Program, target: Target, log: Path) -> Iterator[bool]:
    """Run a program and show its checks. Yields whether each one passed, and False if the program
    failed."""
    with log.open("wb") as errors:
        process = subprocess.Popen(
            ["timeout", str(_TIMEOUT_S), *program.command, *target],
            cwd=program.directory,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                verdict, check, reason = json.loads(line)
                _show(label, verdict, check, reason)
                yield verdict == OK
            process.wait()
        finally:
            process.terminate()  # and `timeout` all its children
    if process.returncode:
        _show(label, FAILED, f"exit code {process.returncode}", f"see {log}")
        yield False


def _show(label: str, verdict: str, check: str, reason: str) -> None:
    print(f"{label:<36}{verdict:<8}{check}{': ' if reason else ''}{reason}", flush=True)


if __name__ == "__main__":
    typer.run(main)
