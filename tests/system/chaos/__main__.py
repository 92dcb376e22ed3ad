"""The long form: prints a table of faults, tries, worst gap and losses; ends with 1 where there is
one. ``--share 0.1`` runs a tenth of it."""

import asyncio
import math
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tests.support.broker import running_node
from tests.system.chaos import ground
from tests.system.chaos.callers import Question
from tests.system.chaos.campaign import Campaign, Row, answers
from tests.system.chaos.deployment import Deployment, smollm2_worker

VOLUME = {
    "worker killed": ("kill_worker", 70),
    "worker drained": ("drain_worker", 20),
    "gateway killed": ("kill_gateway", 40),
    "gateway drained": ("drain_gateway", 10),
    "worker and gateway killed": ("kill_worker_and_gateway", 20),
    "worker stopped and woken": ("stall_worker", 20),
    "broker restarted": ("restart_broker", 10),
    "broker killed": ("kill_broker", 12),
}
TRUTH = {"worker killed": ("kill_worker", 16), "gateway killed": ("kill_gateway", 8)}


def echo_questions(count: int) -> list[Question]:
    return [Question("echo", f"Question {k}", 120 + 10 * (k % 5), seed=k) for k in range(count)]


def smollm2_questions(count: int) -> list[Question]:
    return [Question("smollm2", f"Chapter {k}. It was", 96, seed=k) for k in range(count)]


async def run(
    deployment: Deployment,
    questions: list[Question],
    plan: dict[str, tuple[str, int]],
    *,
    share: float,
    num_callers: int,
) -> list[Row]:
    async with deployment:
        campaign = Campaign(deployment, await answers(deployment, questions), num_callers)
        rows = [
            await campaign.under(name, getattr(deployment, fault), math.ceil(tries * share))
            for name, (fault, tries) in plan.items()
        ]
        await asyncio.to_thread(ground.wait_clean, deployment.node)
    return rows


def table(rows: list[Row]) -> Table:
    table = Table(title="Every stream beside its undisturbed run")
    table.add_column("fault")
    for name in (
        "tries",
        "streams",
        "resumed",
        "worst gap, s",
        "lost",
        "repeated",
        "changed",
        "failed",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        t = row.tally
        counts = (t.num_lost, t.num_repeated, t.num_changed, t.num_failed)
        table.add_row(
            row.fault, str(row.num_tries), str(t.num_streams), str(t.num_resumed),
            f"{t.worst_gap_s:.2f}", *map(str, counts),
        )  # fmt: skip
    return table


def main(
    share: Annotated[float, typer.Option(help="Of the tries of the long form.")] = 1.0,
    callers: Annotated[int, typer.Option(help="Streams at once.")] = 24,
) -> None:
    logs = Path(tempfile.mkdtemp(prefix="warren-chaos-"))
    with running_node() as node:
        rows = asyncio.run(
            run(
                Deployment(node, logs), echo_questions(40), VOLUME, share=share, num_callers=callers
            )
        )
        truth = Deployment(node, logs, start_worker=smollm2_worker, num_workers=2)
        for row in asyncio.run(run(truth, smollm2_questions(6), TRUTH, share=share, num_callers=4)):
            row.fault += ", SmolLM2"
            rows.append(row)
    Console(width=120).print(table(rows))
    for row in rows:
        for error in row.tally.errors[:5]:
            Console().print(f"{row.fault}: {error}", markup=False)
    if any(row.num_wrong for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
