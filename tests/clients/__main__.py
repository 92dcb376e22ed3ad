"""Run the clients that applications use, unmodified, against real deployments of Warren.

    python -m tests.clients [CLIENT ...] [--deployment serve|rabbitmq|llama-server] [--write]

Each client is installed into an environment of its own under ``--directory`` the first time (with
pip or npm; lm-eval and guidellm also install torch). Logs are written there, too. Node, npm and
Chromium must be installed; vLLM is the command in ``PATH`` or of ``--vllm``, and llama-server that
of ``--llama-server`` (see bench/README.md). Without ``--deployment``, serve and rabbitmq are used.
RabbitMQ is a node that ends with the run, or the node of ``WARREN_TEST_AMQP_URL``. If RabbitMQ is
not installed, use ``infra/rabbitmq/with_rabbitmq.sh python -m tests.clients``.

Prints a line for each check. The exit code is 0 if every client ran and all its checks passed.
``--write`` stores the results of the clients that were run, and writes docs/clients.md.
"""

import json
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Annotated

import typer

from docs.site.generate import PAGES, rendered
from tests.clients import results
from tests.clients.catalog import CLIENTS, ROOT, Missing, Program
from tests.clients.checks import FAILED, OK, Target
from tests.clients.deployments import DEPLOYMENTS, USUAL

_DIRECTORY = Path.home() / ".cache" / "warren" / "clients"


def main(
    clients: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(CLIENTS)}.")] = None,
    deployment: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(DEPLOYMENTS)}.")
    ] = None,
    directory: Annotated[Path, typer.Option(help="Of environments and logs.")] = _DIRECTORY,
    vllm: Annotated[Path | None, typer.Option(help="The command, where PATH lacks it.")] = None,
    llama_server: Annotated[
        Path | None, typer.Option(help="The program, where PATH lacks it.")
    ] = None,
    at_once: Annotated[int, typer.Option(help="Clients that run at the same time.")] = 4,
    timeout: Annotated[int, typer.Option(help="Seconds for each client.")] = 600,
    write: Annotated[bool, typer.Option("--write", help="Store the results.")] = False,
) -> None:
    chosen, deployments = clients or list(CLIENTS), deployment or list(USUAL)
    for name in {*chosen} - {*CLIENTS} | {*deployments} - {*DEPLOYMENTS}:
        raise typer.BadParameter(f"there is no {name}")
    for program in (vllm, llama_server):
        if program is not None:
            os.environ["PATH"] += f":{program.absolute().parent}"
    if "llama-server" in deployments and shutil.which("llama-server") is None:
        raise typer.BadParameter("there is no llama-server in PATH")
    prepared = {name: _prepared(name, directory) for name in chosen}
    programs = {name: found for name, found in prepared.items() if isinstance(found, Program)}
    missing = {name: found for name, found in prepared.items() if isinstance(found, Missing)}
    passed = [False] * len(missing)
    for name, reason in missing.items() if write else ():
        results.store_missing(name, str(reason))
    for where in deployments if programs else []:
        with DEPLOYMENTS[where](directory / where) as target, ThreadPoolExecutor(at_once) as pool:
            runs = {
                pool.submit(_run, where, name, program, target, directory, timeout): name
                for name, program in programs.items()
            }
            for run in as_completed(runs):
                verdicts, name = run.result(), runs[run]
                passed += [verdict == OK for verdict in verdicts.values()]
                if write:
                    results.store_run(name, programs[name].version, where, verdicts)
    if write:
        page = PAGES / "clients.md"
        page.write_text(rendered(page.read_text()))
    print(f"{sum(passed)} of {len(passed)} passed")
    raise SystemExit(not all(passed))


def _prepared(name: str, directory: Path) -> Program | Missing:
    try:
        return CLIENTS[name](directory.absolute() / name)
    except Missing as missing:
        _show(name, "missing", "", str(missing))
        return missing


def _run(
    where: str, name: str, program: Program, target: Target, directory: Path, timeout_s: int
) -> dict[str, str]:
    """Run a program and show its checks. Returns the verdict of each check, and a failure if the
    program failed."""
    label, log = f"{where:<8}  {name} {program.version}", directory / where / f"{name}.log"
    verdicts = {}
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            ["timeout", str(timeout_s), *program.command, *target],
            cwd=program.directory,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            verdict, check, reason = json.loads(line)
            _show(label, verdict, check, reason)
            verdicts[check] = verdict
    if process.returncode:
        check = f"exit code {process.returncode}"
        _show(label, FAILED, check, f"see {log}")
        verdicts[check] = FAILED
    return verdicts


def _show(label: str, verdict: str, check: str, reason: str) -> None:
    print(f"{label:<36}{verdict:<8}{check}{': ' if reason else ''}{reason}", flush=True)


if __name__ == "__main__":
    typer.run(main)
