"""The long form: prints its findings, and ends with 1 if anything is wrong."""

import asyncio
import logging
import signal
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tests.support.deployment.broker import running_node
from tests.system.soak import report
from tests.system.soak.run import Plan, soak


def main(
    minutes: Annotated[float, typer.Option(help="How long traffic is sent.")] = 30.0,
    users: Annotated[int, typer.Option(help="Who send one request after another.")] = 24,
    questions: Annotated[int, typer.Option(help="Different ones among the requests.")] = 200,
    seed: Annotated[int, typer.Option(help="Of what users draw.")] = 0,
    provoked: Annotated[
        bool, typer.Option("--provoked", help="Disturb what the broker says to everybody.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Where the tables go as Markdown.")] = None,
) -> None:
    logging.basicConfig(format="%(asctime)s %(message)s")
    logging.getLogger("tests.system.soak").setLevel(logging.INFO)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # clean up
    folder = Path(tempfile.mkdtemp(prefix="warren-soak-"))
    plan = Plan(
        minutes * 60,
        num_users=users,
        num_questions=questions,
        seed=seed,
        is_provoked=provoked,
    )
    with running_node() as node:
        try:
            findings = asyncio.run(soak(node, folder, plan))
        finally:
            (folder / "broker").write_text(node.log)
        broker_version = node.ctl("--silent", "version").strip()
    console = Console(width=132)
    report.print_findings(console, findings)
    if out is not None:
        report.write_page(out, findings, broker_version)
    if not findings.is_good:
        console.print(f"The logs of all processes are in {folder}.")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
