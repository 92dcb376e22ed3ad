"""The long form: prints a table with faults, tries, longest gap and losses.

The exit code is 1 if anything was lost. ``--share 0.1`` runs a tenth, ``--only stopped`` the faults
with that in their name. ``--part engines`` needs the server of another engine, which
``WARREN_TEST_LLAMA_SERVER`` or ``WARREN_TEST_VLLM`` names.
"""

import asyncio
import functools
import logging
import math
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from gateway.batches.serving import LOG_RETENTION_S
from kernels.native.build import best_variant
from tests.support.deployment.broker import RabbitNode, running_cluster, running_node
from tests.support.deployment.postgres import running_postgres
from tests.support.engines.real_servers import real_engines
from tests.support.text.random_text import write_text_model
from tests.system.chaos import ground, report
from tests.system.chaos.batches import (
    BATCH_TUNING,
    batch_options,
    batch_row,
    nothing,
    short_questions,
)
from tests.system.chaos.callers import Question
from tests.system.chaos.campaign import (
    Campaign,
    Check,
    Plan,
    Row,
    answers,
    equals_its_log,
    equals_undisturbed,
)
from tests.system.chaos.cluster import ClusterFaults, url_of
from tests.system.chaos.deployment import (
    SHORT_GRACE,
    SHORT_SILENCE,
    SPOT_TRACE,
    Deployment,
    random_model_workers,
    varied_workers,
)
from tests.system.chaos.engines import MODEL, EngineFaults, engine_workers
from tests.system.chaos.equal import equal_requests
from tests.system.chaos.ledger import ledger_row
from tests.system.chaos.poison import poison
from tests.system.chaos.promises import AUDIT_ALL, promise_rows, sign_with_key_in
from tests.system.chaos.surroundings import surroundings
from worker.checkpoints import store

Scale = Callable[[Plan], Plan]
Part = Callable[[RabbitNode, Path, int, Scale], Coroutine[Any, Any, list[Row]]]

_FORMATS = {
    "float32": "--dtype=float32",
    "bfloat16": "--dtype=bfloat16",
    "q8_0": "--weight-format=q8_0",
    "q4_1": "--weight-format=q4_1",
}


def echo_questions() -> list[Question]:
    return [Question("echo", f"Question {k}", 80 + 10 * (k % 5), seed=k) for k in range(40)]


def smollm2_questions() -> list[Question]:
    return [Question("smollm2", f"Chapter {k}. It was", 64, seed=k) for k in range(6)]


def greedy_questions() -> list[Question]:
    return [Question(MODEL, f"Chapter {k}. It was", 64, seed=k, temperature=0.0) for k in range(6)]


def random_model_questions(model: str, num_tokens: int = 600) -> list[Question]:
    """Questions of ``num_tokens`` or somewhat more. Every other question is answered greedily."""
    return [
        Question(
            model, f"Section {k} describes", num_tokens + 10 * (k % 5), seed=k, temperature=k % 2
        )
        for k in range(20)
    ]


def deployment_at(node: RabbitNode, logs: Path, **options: Any) -> Deployment:
    """Processes with direct connections to the broker."""
    return Deployment(
        logs,
        worker_url=node.url_of("worker"),
        gateway_url=node.url_of("gateway"),
        has_keys=True,
        **options,
    )


async def campaign(
    node: RabbitNode,
    deployment: Deployment,
    plan: Plan,
    num_callers: int,
    questions: list[Question],
    *,
    do_processes_live: bool = False,
    check: Check = equals_undisturbed,
) -> list[Row]:
    """Run the faults of a plan while callers stream, and check that nothing is left of them but
    their usage records.

    Processes that live through all faults must not have grown.
    """
    expected = await answers(deployment, questions)
    before = ground.usages(deployment.processes) if do_processes_live else {}
    rows = await Campaign(deployment, expected, num_callers, check=check).run(plan)
    await asyncio.to_thread(ground.wait_clean, node, deployment, before)
    return [*rows, await asyncio.to_thread(ledger_row, deployment.data_dir, rows)]


async def processes(node: RabbitNode, logs: Path, num_callers: int, scale: Scale) -> list[Row]:
    """Processes come and go; broker and network are well."""
    async with deployment_at(node, logs) as deployment:
        replay = functools.partial(deployment.replay, SPOT_TRACE)
        plan: Plan = {
            "worker killed": (deployment.kill_worker, 70),
            "worker drained": (deployment.drain_worker, 20),
            "worker's machine taken away": (deployment.reclaim_machine, 20),
            "machines taken away by a trace": (replay, 3),
            "gateway killed": (deployment.kill_gateway, 36),
            "gateway drained": (deployment.drain_gateway, 10),
            "worker and gateway killed": (deployment.kill_worker_and_gateway, 16),
        }
        return await campaign(node, deployment, scale(plan), num_callers, echo_questions())


async def deadly(node: RabbitNode, logs: Path, _: int, scale: Scale) -> list[Row]:
    """Some requests kill whoever takes them."""
    async with deployment_at(node, logs) as deployment:
        expected = await answers(deployment, echo_questions())
        row = await poison(deployment, expected, num_innocent=197, num_deadly=3)
        await asyncio.to_thread(ground.wait_clean, node, deployment, {})
        return [row, await asyncio.to_thread(ledger_row, deployment.data_dir, [row])]


async def broker(node: RabbitNode, logs: Path, num_callers: int, scale: Scale) -> list[Row]:
    """The broker is killed and started, while all processes live."""
    async with surroundings(node) as around, deployment_at(node, logs) as deployment:
        plan: Plan = {
            "broker restarted": (around.restart_broker, 10),
            "broker killed": (around.kill_broker, 12),
            "broker out of memory": (around.raise_memory_alarm, 6),
        }
        return await campaign(
            node, deployment, scale(plan), num_callers, echo_questions(), do_processes_live=True
        )


async def cluster(_: RabbitNode, logs: Path, num_callers: int, scale: Scale) -> list[Row]:
    """A node of the broker fails at a time, while all processes live."""
    with running_cluster() as nodes:
        async with Deployment(
            logs,
            worker_url=url_of(nodes, "worker"),
            gateway_url=url_of(nodes, "gateway"),
            has_keys=True,
        ) as deployment:
            faults = ClusterFaults(nodes)
            plan: Plan = {
                "broker node killed": (faults.kill_node, 50),
                "broker node drained and restarted": (faults.upgrade_node, 9),
                "broker node cut off from the others": (faults.part_node, 9),
                "broker node frozen": (faults.freeze_node, 6),
                "queue leaders moved": (faults.move_leaders, 10),
                "disk of a broker node full": (faults.fill_disk, 6),
                "broker node lost for good": (faults.lose_node, 1),
            }
            return await campaign(
                nodes.nodes[0],
                deployment,
                scale(plan),
                num_callers,
                echo_questions(),
                do_processes_live=True,
            )


async def power(node: RabbitNode, logs: Path, num_callers: int, scale: Scale) -> list[Row]:
    """Everything dies at once."""
    async with deployment_at(node, logs) as deployment:
        lose_power = functools.partial(deployment.lose_power, node)
        plan: Plan = {"everything killed": (lose_power, 10)}
        return await campaign(node, deployment, scale(plan), num_callers, echo_questions())


async def network(node: RabbitNode, logs: Path, num_callers: int, scale: Scale) -> list[Row]:
    """The connections between processes and the broker are cut."""
    async with (
        surroundings(node) as around,
        Deployment(
            logs,
            worker_url=around.workers.url,
            gateway_url=around.gateways.url,
            gateway_tuning=SHORT_SILENCE,
            has_keys=True,
        ) as deployment,
    ):
        plan: Plan = {
            "worker stopped and woken": (deployment.stall_worker, 20),
            "workers cut off": (around.cut_workers, 20),
            "gateways cut off": (around.cut_gateways, 20),
            "all cut off": (around.cut, 20),
            "workers in a black hole": (around.lose_workers_network, 6),
            "gateways in a black hole": (around.lose_gateways_network, 6),
            "slow network": (around.delay, 6),
            "consumers timed out": (around.time_consumers_out, 8),
        }
        return await campaign(
            node, deployment, scale(plan), num_callers, echo_questions(), do_processes_live=True
        )


async def truth(node: RabbitNode, logs: Path, _: int, scale: Scale) -> list[Row]:
    """A real model continues after its worker is killed, on another processor."""
    rows = []
    for name, option in _FORMATS.items():
        logs_of_format = logs / name
        logs_of_format.mkdir()
        start_worker = varied_workers(option)
        async with deployment_at(
            node, logs_of_format, start_worker=start_worker, num_workers=2
        ) as deployment:
            model = f"SmolLM2, {name}, avx2 and {best_variant()}"
            plan: Plan = {
                f"worker killed: {model}": (deployment.kill_worker, 10),
                f"gateway killed: {model}": (deployment.kill_gateway, 4),
            }
            rows += await campaign(node, deployment, scale(plan), 4, smollm2_questions())
    return rows


async def states(node: RabbitNode, logs: Path, _: int, scale: Scale) -> list[Row]:
    """A model that keeps states beside keys and values continues after its worker is killed, on
    another processor."""
    directory = logs / "hybrid"
    await asyncio.to_thread(write_text_model, directory, "lfm2")
    start_worker = varied_workers(f"--model={directory}", "--dtype=bfloat16")
    async with deployment_at(node, logs, start_worker=start_worker, num_workers=2) as deployment:
        model = f"random LFM2, avx2 and {best_variant()}"
        plan: Plan = {
            f"worker killed: {model}": (deployment.kill_worker, 20),
            f"worker stopped and woken: {model}": (deployment.stall_worker, 5),
            f"worker and gateway killed: {model}": (deployment.kill_worker_and_gateway, 5),
        }
        questions = random_model_questions(directory.name, num_tokens=250)  # keys permit 300
        return await campaign(node, deployment, scale(plan), 8, questions)


async def device(node: RabbitNode, logs: Path, num_callers: int, scale: Scale) -> list[Row]:
    """Workers share a device, which is a GPU if the environment says so."""
    model = logs / "random"
    await asyncio.to_thread(write_text_model, model)
    async with (
        surroundings(node) as around,
        Deployment(
            logs,
            worker_url=around.workers.url,
            gateway_url=around.gateways.url,
            start_worker=random_model_workers(model),
            num_workers=2,
            gateway_options=[SHORT_GRACE],
            gateway_tuning={**SHORT_SILENCE, "reply_retention_s": 10.0},
        ) as deployment,
    ):
        plan: Plan = {
            f"{name}: random model": fault
            for name, fault in {
                "worker killed": (deployment.kill_worker, 10),
                "gateway killed": (deployment.kill_gateway, 10),
                "broker restarted": (around.restart_broker, 5),
                "worker stopped and woken": (deployment.stall_worker, 5),
                "broker killed": (around.kill_broker, 5),
                "both killed": (deployment.kill_worker_and_gateway, 5),
            }.items()
        }
        questions = random_model_questions(model.name)
        return await campaign(node, deployment, scale(plan), num_callers, questions)


async def engines(node: RabbitNode, logs: Path, num_callers: int, scale: Scale) -> list[Row]:
    """The engines are servers of other kinds, which die and hang. Workers die, too."""
    model = await asyncio.to_thread(store.pull, MODEL, lambda stage, done, total: None)
    found = real_engines()
    if not found:
        raise typer.BadParameter("WARREN_TEST_LLAMA_SERVER or WARREN_TEST_VLLM must name a server")
    rows = []
    for engine in found:
        (logs_of_engine := logs / engine.name).mkdir()
        async with deployment_at(
            node, logs_of_engine, start_worker=engine_workers(engine, model), num_workers=2
        ) as deployment:
            faults = EngineFaults(deployment, engine)
            plan: Plan = {
                f"{name}: {engine.name}": fault
                for name, fault in {
                    "nothing": (nothing, 1),
                    "engine killed": (faults.kill_engine, 30),
                    "engine stopped and woken": (faults.stop_engine, 10),
                    "worker killed": (deployment.kill_worker, 10),
                }.items()
            }
            try:
                rows += await campaign(
                    node,
                    deployment,
                    scale(plan),
                    num_callers,
                    greedy_questions(),
                    check=equals_its_log,
                )
            finally:
                faults.wake_all()
    return rows


async def batches(node: RabbitNode, logs: Path, _: int, scale: Scale) -> list[Row]:
    """A batch goes on while everything dies, the database too."""
    planned = scale({"batch": (nothing, 50_000)})
    if not planned:
        return []
    num_lines = planned["batch"][1]
    with running_postgres() as database:
        options = batch_options(database)
        async with (
            surroundings(node) as around,
            deployment_at(
                node, logs, gateway_options=options, gateway_tuning=BATCH_TUNING
            ) as deployment,
        ):
            faults = (
                deployment.kill_worker,
                deployment.kill_gateway,
                around.kill_broker,
                functools.partial(asyncio.to_thread, database.restart),
            )
            row = await batch_row(deployment, short_questions(), num_lines, faults)
            await asyncio.to_thread(
                functools.partial(
                    ground.wait_clean, node, deployment, {}, log_retention_s=LOG_RETENTION_S
                )
            )
    return [row]


async def equal(node: RabbitNode, logs: Path, _: int, scale: Scale) -> list[Row]:
    """A thousand clients ask the same while workers and gateways are killed."""
    planned = scale({"equal requests": (nothing, 1000)})
    if not planned:
        return []
    async with deployment_at(node, logs, gateway_options=[SHORT_GRACE]) as deployment:
        question = Question("echo", "The same for all", 1000, seed=1)
        (expected,) = (await answers(deployment, [question])).values()
        num_clients = planned["equal requests"][1]
        row = await equal_requests(
            deployment,
            question,
            expected,
            num_clients,
            lambda runs: [
                runs.kill_worker,
                deployment.kill_gateway,
                runs.kill_worker_and_gateway,
                deployment.kill_gateway,
            ],
        )
        await asyncio.to_thread(ground.wait_clean, node, deployment, {})
    return [row]


async def promises(node: RabbitNode, logs: Path, num_callers: int, scale: Scale) -> list[Row]:
    """Forks, receipts, audits and deadlines, while workers and gateways are killed."""
    options = [sign_with_key_in(logs), AUDIT_ALL]
    async with deployment_at(node, logs, gateway_options=options) as deployment:
        plan: Plan = {
            "forks: worker and gateway killed": (deployment.kill_worker_and_gateway, 8),
            "receipts: worker and gateway killed": (deployment.kill_worker_and_gateway, 8),
            "audits: worker killed": (deployment.kill_worker, 8),
            "deadlines: worker killed": (deployment.kill_worker, 8),
        }
        expected = await answers(deployment, echo_questions())
        rows = await promise_rows(deployment, expected, num_callers, scale(plan))
        await asyncio.to_thread(ground.wait_clean, node, deployment, {})
        return [*rows, await asyncio.to_thread(ledger_row, deployment.data_dir, rows)]


PARTS: dict[str, Part] = {
    "processes": processes,
    "deadly": deadly,
    "equal": equal,
    "promises": promises,
    "broker": broker,
    "cluster": cluster,
    "power": power,
    "network": network,
    "truth": truth,
    "states": states,
    "device": device,
    "engines": engines,
    "batches": batches,
}


def main(
    share: Annotated[float, typer.Option(help="Of the tries of the long form.")] = 1.0,
    callers: Annotated[int, typer.Option(help="Streams at once.")] = 24,
    part: Annotated[list[str] | None, typer.Option(help="Of: " + ", ".join(PARTS))] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Faults that have this in their name. Repeatable.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where the table goes as Markdown.")] = None,
) -> None:
    def scale(plan: Plan) -> Plan:
        return {
            name: (fault, math.ceil(num * share))
            for name, (fault, num) in plan.items()
            if any(words in name for words in only or [""])
        }

    logging.basicConfig(format="%(asctime)s %(message)s")
    logging.getLogger("tests.system.chaos").setLevel(logging.INFO)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # clean up
    logs = Path(tempfile.mkdtemp(prefix="warren-chaos-"))
    rows: list[Row] = []
    with running_node() as node:
        for name in part or [one for one in PARTS if one != "engines" or real_engines()]:
            (logs / name).mkdir()
            rows += asyncio.run(PARTS[name](node, logs / name, callers, scale))
            if out is not None:
                report.write_page(out, rows, node)
    Console(width=132).print(report.table(rows))
    for row in rows:
        for error in row.tally.errors[:5]:
            Console().print(f"{row.fault}: {error}", markup=False)
    if any(row.num_wrong for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
