"""The account of a worker that can serve only some models. `test_rabbitmq_permissions` tries it at
a real broker."""

import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from infra.rabbitmq.worker_account import definitions
from shared import topology
from shared.bus.base import Exchange, Message, Queue
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.errors import AccessRefused
from worker.process.prepared_queues import declare_or_find

MODEL = "llama-3.1"
OTHERS = ("llama-3x1", "llama-3.1.interactive", "llama-3.1-big", "xllama-3.1", "other", ".*")
WORKER_ID = "0123abcd"


def account(*models: str) -> dict[str, Any]:
    return definitions("worker-llama", list(models or (MODEL,)), "warren")


def may(verb: str, name: str, *models: str) -> bool:
    [permissions] = account(*models)["permissions"]
    return re.search(permissions[verb], name) is not None


class LimitedBus(MemoryBus):
    """Refuses what the broker refuses to the account, and finds what an operator declared."""

    async def declare(self, *resources: Exchange | Queue) -> None:
        for resource in resources:
            await declare_or_find(resource, self._declare, self.inspect)

    async def _declare(self, resource: Exchange | Queue) -> None:
        if isinstance(resource, Queue):
            if not (may("configure", resource.name) and may("write", resource.name)):
                raise AccessRefused(f"access to queue '{resource.name}' refused")
            for name in (binding.exchange.name for binding in resource.bindings):
                if not may("read", name):
                    raise AccessRefused(f"access to exchange '{name}' refused")
        await super().declare(resource)


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
async def limited(broker: MemoryBroker) -> AsyncIterator[LimitedBus]:
    async with LimitedBus(broker) as bus:
        yield bus


@pytest.mark.parametrize("lane", topology.DECLARED_LANES)
def test_it_reads_the_jobs_of_its_models_alone(lane: topology.Lane) -> None:
    for model in (MODEL, "b"):
        assert may("read", topology.jobs_queue(model, lane).name, MODEL, "b")
    for model in OTHERS:
        assert not may("read", topology.jobs_queue(model, lane).name, MODEL, "b")


@pytest.mark.parametrize("exchange", [topology.JOBS, topology.SUSPECTS, topology.DEAD])
def test_it_binds_nothing_to_the_exchanges_of_jobs(exchange: Exchange) -> None:
    assert not may("read", exchange.name)


@pytest.mark.parametrize("verb", ["configure", "write", "read"])
@pytest.mark.parametrize("name", ["jobs.dead", "ledger.records", "control.gateway.x", "jobs.x", ""])
def test_it_reaches_no_queue_of_others(verb: str, name: str) -> None:
    assert not may(verb, name)


def test_it_declares_no_queue_of_jobs() -> None:
    for lane in topology.DECLARED_LANES:
        name = topology.jobs_queue(MODEL, lane).name
        assert not may("configure", name)
        assert not may("write", name)
    assert not may("configure", topology.near_queue(MODEL, "worker.x").name)


def test_its_topics_are_those_of_workers() -> None:
    replies, control = account()["topic_permissions"]

    assert (replies["exchange"], control["exchange"]) == ("warren.replies", "warren.control")
    assert [re.search(replies[verb], "reply.x") is None for verb in ("write", "read")] == [
        False,
        True,
    ]
    for key, verbs in (
        ("worker.x", ["read"]),
        ("worker.#", []),
        ("gateways", []),
    ):
        assert [verb for verb in ("write", "read") if re.search(control[verb], key)] == verbs


def test_the_queues_are_bound_as_workers_bind_them() -> None:
    described = account()

    names = {queue["name"] for queue in described["queues"]}
    bound = {
        (one["source"], one["routing_key"], one["destination"]) for one in described["bindings"]
    }
    expected = [topology.jobs_queue(MODEL, lane) for lane in topology.DECLARED_LANES]
    expected += [topology.DEAD_LETTERS, topology.LEDGER_RECORDS]
    assert names == {queue.name for queue in expected}
    assert bound == {
        (one.exchange.name, one.routing_key, queue.name)
        for queue in expected
        for one in queue.bindings
    }


async def test_a_worker_runs_on_the_queues_that_an_operator_declared(
    broker: MemoryBroker, limited: LimitedBus
) -> None:
    async with MemoryBus(broker) as operator:
        await topology.declare_worker(operator, MODEL, "another")

        await topology.declare_worker(limited, MODEL, WORKER_ID)
        jobs = topology.jobs_queue(MODEL, "interactive")
        await operator.publish(jobs.bindings[0], Message(b"job"))
        await operator.publish(topology.worker_binding(f"worker.{WORKER_ID}"), Message(b"cancel"))

        for queue, body in ((jobs, b"job"), (topology.worker_queue(WORKER_ID), b"cancel")):
            async with limited.consume(queue.name) as consumer:
                assert (await anext(consumer)).message.body == body


async def test_a_queue_that_it_may_declare_but_not_bind_is_refused(limited: LimitedBus) -> None:
    bindings = topology.jobs_queue("other", "batch").bindings
    for is_exclusive in (False, True):
        queue = Queue("control.worker.x", bindings, is_exclusive=is_exclusive)
        with pytest.raises(AccessRefused):
            await limited.declare(queue)


async def test_a_worker_of_another_model_does_not_start(limited: LimitedBus) -> None:
    with pytest.raises(AccessRefused):
        await topology.declare_worker(limited, "other", WORKER_ID)


def run_script(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "infra.rabbitmq.worker_account", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_script_prints_what_the_broker_imports() -> None:
    printed = run_script("worker-llama", MODEL, "--vhost", "warren")

    assert json.loads(printed.stdout) == account()


def test_a_user_whose_name_is_a_pattern_is_refused() -> None:
    refused = run_script("worker.*", MODEL)

    assert refused.returncode == 2
    assert "worker.*" in refused.stderr
