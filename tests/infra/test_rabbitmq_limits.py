"""The shipped policies bound what the broker stores."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import httpx
import msgspec
import pytest

from shared import topology
from shared.bus.base import Binding, Message
from shared.bus.rabbit import RabbitBus
from shared.dead_letters import DeadLetter, opened
from shared.errors import PublishRefused
from shared.messages import SamplingParams
from tests.infra.test_rabbitmq_definitions import DEFINITIONS
from tests.support import PATIENCE_S
from tests.support.deployment.broker import RabbitNode, running_node
from tests.support.deployment.processes import NO_TLS, free_port
from tests.support.metrics import total
from tests.support.workers.jobs import new_job, publish
from tests.support.workers.synthetic import echo_worker

pytestmark = [pytest.mark.rabbit, pytest.mark.breaks_broker]

JOBS = topology.jobs_queue("limits-test", "interactive")
BODY = bytes(1_000)
SMALL = {"max-length": 5, "max-length-bytes": 10_000}
"""Limits that a test reaches quickly, in place of the shipped limits."""
LOG = topology.reply_queue("publisher.limits-test", expires_s=600)
COMMANDS = topology.worker_queue("limits-test")
LAST = [b"15", b"16", b"17", b"18", b"19"]
"""The dead letters that are kept of 20."""


def shrink(node: RabbitNode, definitions: Path, limits: Mapping[str, int] = SMALL) -> None:
    """Import the shipped policies with lower limits, by way of the file ``definitions``."""
    policies = []
    for policy in DEFINITIONS["policies"]:
        shipped = policy["definition"]
        lower = {name: limits.get(name, value) for name, value in shipped.items()}
        policies.append({**policy, "definition": lower})
    definitions.write_text(json.dumps({"policies": policies}))
    node.ctl("import_definitions", str(definitions))


@pytest.fixture(scope="module")
def small_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitNode]:
    """A node with the shipped policies, of which only the limits are lower."""
    with running_node() as node:
        shrink(node, tmp_path_factory.mktemp("limits") / "definitions.json")
        yield node


@pytest.fixture
async def small_broker(small_node: RabbitNode) -> AsyncIterator[RabbitNode]:
    yield small_node
    async with RabbitBus(small_node.url) as operator:
        for queue in (JOBS, LOG, COMMANDS, topology.DEAD_LETTERS):
            await operator.delete_queue(queue.name)


async def bodies(bus: RabbitBus, queue: str) -> list[bytes]:
    """The bodies of the messages in a queue, which stay there."""
    num_bodies = await num_ready(bus, queue)
    async with bus.consume(queue) as consumer:
        return [(await anext(consumer)).message.body for _ in range(num_bodies)]


async def num_ready(bus: RabbitBus, queue: str) -> int:
    state = await bus.inspect(queue)
    assert state is not None
    return state.num_ready


async def first_letter(bus: RabbitBus) -> DeadLetter:
    """Wait for a dead letter."""
    while True:
        async with opened(bus, 1) as letters:
            if letters:
                return letters[0]


async def refuse_more(bus: RabbitBus, binding: Binding = JOBS.bindings[0]) -> None:
    """Publish until the broker refuses a message."""
    for _ in range(100):
        await bus.publish(binding, Message(BODY))


async def dead_letter(bus: RabbitBus, num_jobs: int) -> None:
    """Publish jobs of which a worker rejects each."""
    async with bus.consume(JOBS.name, prefetch=1) as consumer:
        for k in range(num_jobs):
            await bus.publish(JOBS.bindings[0], Message(b"%d" % k))
            await (await anext(consumer)).reject()


async def test_stored_bytes_and_dead_letters_are_bounded(small_broker: RabbitNode) -> None:
    async with (
        RabbitBus(small_broker.url_of("worker")) as worker,
        RabbitBus(small_broker.url_of("publisher")) as publisher,
    ):
        await worker.declare(topology.DEAD_LETTERS, JOBS)

        await dead_letter(worker, 20)
        with pytest.raises(PublishRefused):
            await refuse_more(publisher)

        assert 10 <= len(await bodies(worker, JOBS.name)) < 100
        # Dead letters arrive asynchronously.
        while await bodies(worker, topology.DEAD_LETTERS.name) != LAST:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_dead_letters_expire(small_broker: RabbitNode, tmp_path: Path) -> None:
    shrink(small_broker, tmp_path / "definitions.json", {**SMALL, "message-ttl": 100})
    async with RabbitBus(small_broker.url_of("worker")) as worker:
        await worker.declare(topology.DEAD_LETTERS)

        await worker.publish(topology.DEAD_LETTERS.bindings[0], Message(BODY))

        while await num_ready(worker, topology.DEAD_LETTERS.name):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    shrink(small_broker, tmp_path / "definitions.json")


async def test_logs_that_nobody_reads_and_commands_are_bounded(small_broker: RabbitNode) -> None:
    async with (
        RabbitBus(small_broker.url_of("worker")) as worker,
        RabbitBus(small_broker.url_of("publisher")) as publisher,
    ):
        await worker.declare(COMMANDS)
        await publisher.declare(LOG)

        with pytest.raises(PublishRefused):
            await refuse_more(worker, LOG.bindings[0])
        for k in range(20):
            await publisher.publish(COMMANDS.bindings[0], Message(b"%d" % k))

        assert await bodies(publisher, LOG.name) == [BODY] * SMALL["max-length"]
        assert await bodies(worker, COMMANDS.name) == LAST


async def test_a_job_whose_log_is_full_becomes_a_dead_letter_with_this_reason(
    small_broker: RabbitNode, caplog: pytest.LogCaptureFixture
) -> None:
    sampling = SamplingParams(max_tokens=1_000, ignore_eos=True)
    job = msgspec.structs.replace(
        new_job("echo", sampling=sampling), request_id="publisher.limits-test", is_detached=True
    )
    port = free_port()
    async with (
        RabbitBus(small_broker.url_of("worker")) as worker,
        RabbitBus(small_broker.url_of("publisher")) as publisher,
        echo_worker(worker, step_s=0.01, health_port=port),
    ):
        await publisher.declare(LOG)
        with caplog.at_level(logging.WARNING):
            await publish(publisher, job)
            dead = await first_letter(worker)
        url = f"http://127.0.0.1:{port}/metrics"
        metrics = await asyncio.to_thread(httpx.get, url, timeout=PATIENCE_S, verify=NO_TLS)

        assert len(await bodies(publisher, LOG.name)) == SMALL["max-length"]

    assert (dead.request_id, dead.reason) == (job.request_id, "rejected")
    [line] = [one for one in caplog.records if one.message == "job dead-lettered"]
    assert vars(line)["reason"] == PublishRefused.code
    assert total(metrics.text, "warren_worker_dead_letters_total") == 1
    full = [one for one in caplog.records if one.message == "event refused"]
    assert {vars(one)["queue"] for one in full} == {LOG.name}
