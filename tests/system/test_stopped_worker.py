"""A resumed stream whose worker is stopped: no live worker holds its job."""

import asyncio
import math
import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from gateway.log import stalls
from shared.bus.rabbit import RabbitBus
from tests.support.deployment.broker import Broker
from tests.support.deployment.processes import WarrenProcess, free_port
from tests.support.gateway.http import SECRET, LiveGateway, events, live_gateway

pytestmark = pytest.mark.rabbit

HEARTBEAT_S = 1
GRACE_S = 60
BODY = {
    "model": "echo",
    "prompt": "Who goes on?",
    "max_tokens": 150,
    "ignore_eos": True,
    "seed": 7,
}


class Workers:
    """Workers whose connections are dead after two to three silent heartbeats."""

    def __init__(self, broker: Broker, folder: Path, stack: ExitStack) -> None:
        self._url = f"{broker.url_of('worker')}?heartbeat={HEARTBEAT_S}"
        self._folder = folder
        self._stack = stack

    def start(self, name: str, *options: str) -> WarrenProcess:
        port = free_port()
        args = ["-m", "tests.system.chaos.worker", f"--broker={self._url}"]
        args += [f"--health-port={port}", "--stall-timeout-s=60", *options]
        # A worker waits for the readers of its jobs as long as the gateways do.
        variables = {"WARREN_DISCONNECT_GRACE_S": f"{GRACE_S}"}
        worker = WarrenProcess(args, port, self._folder / name, variables)
        worker.start()
        self._stack.callback(worker.terminate)
        worker.wait_healthy()
        return worker


@pytest.fixture
def workers(broker: Broker, tmp_path: Path) -> Iterator[Workers]:
    with ExitStack() as stack:
        yield Workers(broker, tmp_path, stack)


async def leave_in_the_middle(gateway: LiveGateway) -> tuple[str, str]:
    """The path at which the stream continues, and the part that was read."""
    headers = {"accept": "text/event-stream"}
    body = {**BODY, "stream": True}
    async with gateway.http.stream("POST", "/v1/completions", json=body, headers=headers) as left:
        seen = ""
        async for piece in left.aiter_text():
            seen += piece
            if seen.count("\n\n") > 2:
                break
        return f"/v1/streams/{left.headers['x-request-id']}", seen[: seen.rfind("\n\n") + 2]


def text_of(chunks: list[Any]) -> str:
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


async def test_it_goes_on_elsewhere_when_the_broker_misses_the_workers_heartbeats(
    broker: Broker, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stalls, "STRANDED_S", math.inf)  # gateways do nothing for the stream
    options = {"disconnect_grace_s": GRACE_S, "secret": SECRET}
    # Its answer takes minutes, so that it has not ended before it is stopped.
    sleeper = await asyncio.to_thread(workers.start, "sleeper", "--step-ms=1000")
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
            await asyncio.to_thread(workers.start, "other")
            os.kill(sleeper.pid, signal.SIGSTOP)
            rest += "".join([piece async for piece in pieces])
        sleeper.kill()
        undisturbed = (await first.post("/v1/completions", **BODY)).json()

    *chunks, done = events(seen + rest)
    assert done == "[DONE]"
    assert text_of(chunks) == undisturbed["choices"][0]["text"]
