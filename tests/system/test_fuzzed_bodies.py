"""Malformed messages and requests harm nobody: short runs of `tests.system.fuzz`."""

import asyncio
import logging
from pathlib import Path

import pytest

from shared.bus.rabbit import RabbitBus
from tests.support.deployment import processes
from tests.support.deployment.broker import Broker
from tests.system.fuzz import (
    MORE_MEMORY_BYTES,
    NUM_HONEST,
    OF_A_VICTIM,
    SINK,
    attack,
    check,
    grown_bytes,
)

NUM_IN_MEMORY = 750
NUM_REQUESTS = 400
NUM_OVER_RABBITMQ = 300
MAX_ROUNDS = 12
"""Which bodies and requests are served in time depends on the machine; more are sent until each
kind was."""


async def test_no_body_harms_a_deployment(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)

    grown = await grown_bytes(NUM_IN_MEMORY, NUM_REQUESTS, seed=1)

    assert {record.message for record in caplog.records} <= {OF_A_VICTIM}
    assert grown < MORE_MEMORY_BYTES


@pytest.mark.rabbit
async def test_no_body_harms_processes(broker: Broker, tmp_path: Path) -> None:
    drain = "--drain-grace-s=2"
    # Jobs that are long or have no end or no reader must not delay others for long, because
    # suspects run one after another.
    limits = {
        "WARREN_MAX_SEQ_LEN": "256",
        "WARREN_REQUEST_TIMEOUT_S": "2",
    }
    options = ("--step-ms=1", '--tuning={"reader_grace_s": 2}', drain)
    worker = processes.echo_worker(broker.url_of("worker"), tmp_path / "worker", *options, **limits)
    gateway = processes.gateway(broker.url_of("gateway"), tmp_path / "gateway", drain)
    with worker, gateway:
        async with RabbitBus(broker.url) as bus, attack(bus, gateway.url, seed=2) as it:
            for _ in range(MAX_ROUNDS):
                await it.publish(NUM_OVER_RABBITMQ)
                await it.wait_answered()
                if not it.never_sent and len(it.honest) > NUM_HONEST:
                    break
            await asyncio.to_thread(worker.wait_healthy)
            await asyncio.to_thread(gateway.wait_healthy)
        async with RabbitBus(broker.url) as bus:
            await bus.delete_queue(SINK.name)

    check(it)
    for line in (worker.log + gateway.log).splitlines():
        assert OF_A_VICTIM in line or "Traceback" not in line
