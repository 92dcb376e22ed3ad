"""A resumed stream whose worker is stopped: no live worker holds its job."""

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from shared.bus.rabbit import RabbitBus
from tests.support.deployment.broker import Broker
from tests.support.deployment.processes import WarrenProcess, free_port
from tests.support.gateway.http import SECRET, LiveGateway, events, live_gateway
from tests.support.metrics import sample

pytestmark = pytest.mark.rabbit

HEARTBEAT_S = 1
BODY = {
    "model": "echo",
    "prompt": "Who goes on?",
    "max_tokens": 150,
    "ignore_eos": True,
    "seed": 7,
}
RUNNING = "warren_worker_sequences_running"


@pytest.fixture
def workers(broker: Broker, tmp_path: Path) -> Iterator[list[WarrenProcess]]:
    """Two, whose connections are dead after two to three silent heartbeats."""
    url = f"--broker={broker.url_of('worker')}?heartbeat={HEARTBEAT_S}"
    with ExitStack() as stack:
        started = []
        for k in range(2):
            port = free_port()
            args = ["-m", "tests.system.chaos.worker", url, f"--health-port={port}"]
            worker = WarrenProcess(args, port, tmp_path / f"worker{k}")
            worker.start()
            stack.callback(worker.kill)
            started.append(worker)
        for worker in started:
            worker.wait_healthy()
        yield started


def busy(workers: list[WarrenProcess]) -> WarrenProcess:
    (worker,) = [w for w in workers if sample(w, RUNNING) == 1]
    return worker


async def leave_in_the_middle(gateway: LiveGateway) -> tuple[str, str]:
    """The path at which the stream continues, and the part that was read."""
    headers = {"accept": "text/event-stream"}
    body = {**BODY, "stream": True}
    async with gateway.http.stream("POST", "/v1/completions", json=body, headers=headers) as left:
        seen = ""
        async for piece in left.aiter_text():
            seen += piece
            if seen.count("\n\n") > 10:
                break
        return f"/v1/streams/{left.headers['x-request-id']}", seen[: seen.rfind("\n\n") + 2]


def text_of(chunks: list[Any]) -> str:
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


async def test_it_goes_on_elsewhere_when_the_broker_misses_the_workers_heartbeats(
    broker: Broker, workers: list[WarrenProcess]
) -> None:
    options = {"disconnect_grace_s": 5, "secret": SECRET}
    async with (
        RabbitBus(broker.url_of("gateway")) as one,
        RabbitBus(broker.url_of("gateway")) as other,
        live_gateway(one, **options) as first,
        live_gateway(other, **options) as second,
    ):
        path, seen = await leave_in_the_middle(first)
        last_id = re.findall(r"^id: (\S+)$", seen, re.MULTILINE)[-1]
        headers = {"last-event-id": last_id}
        async with second.http.stream("GET", path, headers=headers) as resumed:
            pieces = resumed.aiter_text()
            rest = await anext(pieces)
            sleeper = await asyncio.to_thread(busy, workers)
            os.kill(sleeper.pid, signal.SIGSTOP)
            async with asyncio.timeout(3 * HEARTBEAT_S + 10):  # the tokens alone take 3
                rest += "".join([piece async for piece in pieces])
        undisturbed = (await first.post("/v1/completions", **BODY)).json()

    *chunks, done = events(seen + rest)
    assert done == "[DONE]"
    assert text_of(chunks) == undisturbed["choices"][0]["text"]
