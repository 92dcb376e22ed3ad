"""A short run of `python -m tests.system.chaos`."""

import asyncio
from pathlib import Path

import pytest

from tests.support.deployment.broker import RabbitCluster, RabbitNode
from tests.support.deployment.processes import WarrenProcess
from tests.system.chaos import ground
from tests.system.chaos.callers import Question
from tests.system.chaos.campaign import Campaign, Plan, Row, answers
from tests.system.chaos.cluster import ClusterFaults, url_of
from tests.system.chaos.deployment import (
    SHORT_GRACE,
    SHORT_SILENCE,
    Deployment,
    mortal_worker,
)
from tests.system.chaos.equal import equal_requests
from tests.system.chaos.ledger import ledger_row
from tests.system.chaos.poison import poison
from tests.system.chaos.promises import Receipts, sign_with_key_in
from tests.system.chaos.surroundings import surroundings

pytestmark = [pytest.mark.rabbit, pytest.mark.timeout(600)]

QUESTIONS = [Question("echo", f"Question {k}", 40 + 10 * (k % 3), seed=k) for k in range(12)]
OF_ALL = Question("echo", "The same for all", 120, seed=1)
NUM_CALLERS = 4


def slow_worker(broker: str, log: Path) -> WarrenProcess:
    """As many streams are open as with a faster worker, for a fifth of its CPU time. On a busy
    machine no watchdog ends it."""
    return mortal_worker(broker, log, "--step-ms=100", "--stall-timeout-s=60")


def wrong(rows: list[Row]) -> list[str]:
    return [f"{row.fault}: {error}" for row in rows for error in row.tally.errors]


async def test_no_fault_takes_a_stream_with_it(own_broker: RabbitNode, tmp_path: Path) -> None:
    async with (
        surroundings(own_broker) as around,
        Deployment(
            tmp_path,
            worker_url=around.workers.url,
            gateway_url=around.gateways.url,
            gateway_options=[SHORT_GRACE, sign_with_key_in(tmp_path)],
            gateway_tuning=SHORT_SILENCE,
            start_worker=slow_worker,
            num_workers=2,
            has_keys=True,
        ) as deployment,
    ):
        plan: Plan = {
            "both killed": (deployment.kill_worker_and_gateway, 1),
            "workers in a black hole": (around.lose_workers_network, 1),
            "consumers timed out": (around.time_consumers_out, 1),
            "broker killed": (around.kill_broker, 1),
            "broker out of memory": (around.raise_memory_alarm, 1),
        }
        expected = await answers(deployment, [*QUESTIONS, OF_ALL])
        for_all = expected.pop(OF_ALL)
        receipts = await Receipts.of(deployment)
        rows = await Campaign(deployment, expected, NUM_CALLERS, check=receipts.check).run(plan)
        rows.append(await poison(deployment, expected, num_innocent=11, num_deadly=1))
        await asyncio.to_thread(ground.wait_clean, own_broker, deployment, {})
        rows.append(await asyncio.to_thread(ledger_row, deployment.data_dir, rows))
        rows.append(
            await equal_requests(
                deployment,
                OF_ALL,
                for_all,
                60,
                lambda runs: [runs.kill_worker, deployment.kill_gateway],
            )
        )
        await asyncio.to_thread(ground.wait_clean, own_broker, deployment, {})

    assert wrong(rows) == []


async def test_no_node_of_a_cluster_takes_a_stream_with_it(
    own_cluster: RabbitCluster, tmp_path: Path
) -> None:
    async with Deployment(
        tmp_path,
        worker_url=url_of(own_cluster, "worker"),
        gateway_url=url_of(own_cluster, "gateway"),
        gateway_options=[SHORT_GRACE],
        start_worker=slow_worker,
        num_workers=2,
        has_keys=True,
    ) as deployment:
        faults = ClusterFaults(own_cluster, loss_s=4)
        plan: Plan = {
            "broker node killed": (faults.kill_node, 1),
            "broker node lost for good": (faults.lose_node, 1),
        }
        expected = await answers(deployment, QUESTIONS)
        rows = await Campaign(deployment, expected, NUM_CALLERS).run(plan)
        await asyncio.to_thread(ground.wait_clean, own_cluster.nodes[0], deployment, {})
        rows.append(await asyncio.to_thread(ledger_row, deployment.data_dir, rows))

    assert wrong(rows) == []
