"""A gateway and a scripted worker in a process of their own, whose memory can be measured.

``python -m tests.support.lone_gateway PORT``
"""

import asyncio
import re
import sys
from pathlib import Path

import uvloop

from shared.bus.memory import MemoryBroker, MemoryBus
from tests.support.http import live_gateway
from tests.support.processes import WarrenProcess, free_port
from tests.support.scripted_worker import ScriptedWorker


def lone_gateway(log: Path, **settings: str) -> WarrenProcess:
    """Each of ``settings`` is a variable without its prefix."""
    port = free_port()
    variables = {f"WARREN_{name.upper()}": value for name, value in settings.items()}
    args = ["-m", "tests.support.lone_gateway", str(port)]
    return WarrenProcess(args, port, log, variables)


def peak_memory_bytes(process: WarrenProcess) -> int:
    """The most memory that the process ever had."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert peak is not None
    return int(peak[1]) << 10


async def _serve(port: int) -> None:
    broker = MemoryBroker()
    async with (
        MemoryBus(broker) as worker_bus,
        MemoryBus(broker) as bus,
        ScriptedWorker(worker_bus),
        live_gateway(bus, port=port),
    ):
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1])))
