"""A gateway and a scripted worker in a process of their own, whose memory can be measured.

``python -m tests.support.gateway.lone_gateway PORT``
"""

import re
import sys
from pathlib import Path

import uvloop

from gateway.app import create_app
from gateway.server import listen, opened
from shared import settings
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.settings import GatewaySettings
from tests.support.deployment.processes import WarrenProcess, free_port
from tests.support.workers.scripted_worker import ScriptedWorker


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
            await server.serve([listener])


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1])))
