"""A gateway and a scripted worker in a process of their own, whose memory can be measured.

At their broker there are also logs that another program has described as it likes: see `PLANTED`.

``python -m tests.support.gateway.lone_gateway PORT``
"""

import re
import sys
from collections.abc import Mapping
from pathlib import Path

import uvloop

from gateway.api.render.formats import Rendering
from gateway.app import create_app
from gateway.log.cursor import LogFacts
from gateway.server import listen, opened
from shared import settings, topology
from shared.bus.base import Bus, Message
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.messages import MAX_CONTEXT_BYTES, Failed, Started, encode
from shared.settings import GatewaySettings
from tests.support.deployment.processes import WarrenProcess, free_port
from tests.support.workers.scripted_worker import ScriptedWorker


def _planted(num_choices: int, tool_names: tuple[str, ...] | None = None) -> bytes:
    rendering = Rendering(
        endpoint="chat",
        request_id="planted",
        model="scripted",
        created=1,
        num_choices=num_choices,
        tool_parser="hermes",
        tool_names=tool_names,
    )
    facts = LogFacts(tenant="", body_hash="", num_choices=num_choices, rendering=encode(rendering))
    return facts.encode()


PLANTED: Mapping[str, bytes] = {
    f"chatcmpl-{k:032x}": context
    for k, context in enumerate(
        (
            _planted(10_000_000),
            _planted(1, tuple(f"t{k}" for k in range(MAX_CONTEXT_BYTES // 10))),
            b"\x81\xa7unknown" + b"\x91" * (MAX_CONTEXT_BYTES - 16),
            b"\xc1" * MAX_CONTEXT_BYTES,
        )
    )
}
"""Descriptions that no gateway has written, by the id of the stream."""


async def plant(bus: Bus) -> None:
    """Write the logs of `PLANTED`, each with its description many times, and with an end."""
    for name, context in PLANTED.items():
        log = topology.reply_queue(name, expires_s=600)
        await bus.declare(topology.REPLIES, log)
        events = [
            Started(worker="worker.w", ticket=str(k), num_prompt_tokens=(1,), context=context)
            for k in range(10)
        ]
        end = Failed(code="internal_error", message="It was planted.", ticket="0")
        for event in (*events, end):
            await bus.publish(log.bindings[0], Message(encode(event)))


def lone_gateway(log: Path, **variables: str) -> WarrenProcess:
    port = free_port()
    args = ["-m", "tests.support.gateway.lone_gateway", str(port)]
    return WarrenProcess(args, port, log, variables)


def peak_memory_bytes(process: WarrenProcess) -> int:
    """The most memory that the process ever had."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert peak is not None
    return int(peak[1]) << 10


async def _serve(port: int) -> None:
    chosen = settings.load(GatewaySettings, port=port)
    broker = MemoryBroker()
    with listen(chosen) as listener:
        async with (
            MemoryBus(broker) as worker_bus,
            MemoryBus(broker) as bus,
            ScriptedWorker(worker_bus),
            opened(create_app(chosen, bus), chosen) as server,
        ):
            await plant(worker_bus)
            await server.serve([listener])


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1])))
