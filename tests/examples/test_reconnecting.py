"""The examples that resume streams receive everything when the network breaks in between."""

import asyncio
import re
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shared.bus.memory import MemoryBroker, MemoryBus
from tests.support.deployment.processes import free_port
from tests.support.gateway.http import hears_a_worker, live_gateway
from tests.support.network.tcp_proxy import TcpProxy
from tests.support.workers.scripted_worker import MODEL, ScriptedJob, ScriptedWorker

EXAMPLES = Path(__file__).parents[2] / "examples"
_TIMEOUT_S = 240


@asynccontextmanager
async def breaking_network(is_cut: asyncio.Event) -> AsyncIterator[TcpProxy]:
    """A server behind a network, whose worker sends half of its answer before ``is_cut``."""

    async def in_two_halves(job: ScriptedJob) -> None:
        await job.start()
        await job.say("one ")
        await job.say("two ")
        await is_cut.wait()
        await job.say("three ")
        await job.finish("four")

    broker = MemoryBroker()
    async with (
        MemoryBus(broker) as worker_bus,
        ScriptedWorker(worker_bus, in_two_halves),
        live_gateway(broker) as gateway,
        TcpProxy(gateway.url) as network,
    ):
        await hears_a_worker(gateway)
        yield network


async def written(command: Sequence[str], network: TcpProxy, is_cut: asyncio.Event) -> str:
    """The output of a client while the network breaks after its second token."""
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    async with asyncio.timeout(_TIMEOUT_S):
        first = await process.stdout.readuntil(b"two")
        network.sever()
        is_cut.set()
        rest = await process.stdout.read()
        assert await process.wait() == 0
    return (first + rest).decode()


async def test_curl_comes_back() -> None:
    is_cut = asyncio.Event()
    async with breaking_network(is_cut) as network:
        command = ["bash", str(EXAMPLES / "resume.sh"), network.url.rstrip("/"), MODEL]
        output = await written(command, network, is_cut)

    assert re.findall(r'"content":"(\w+) ?"', output) == ["one", "two", "three", "four"]
    assert output.rstrip().endswith("data: [DONE]")


async def test_curl_does_not_come_back_to_a_server_that_is_not_there() -> None:
    process = await asyncio.create_subprocess_exec(
        *("bash", str(EXAMPLES / "resume.sh"), f"http://127.0.0.1:{free_port()}"),
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(_TIMEOUT_S):
        _, errors = await process.communicate()

    assert process.returncode == 1
    assert b"no stream has begun" in errors


async def test_the_page_comes_back() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    is_cut = asyncio.Event()
    async with breaking_network(is_cut) as network:
        program = str(Path(__file__).with_name("page.mjs"))
        page = str(EXAMPLES / "stream.html")
        command = [node, program, page, network.url.rstrip("/"), MODEL]
        output = await written(command, network, is_cut)

    assert output == "one two three four\nDone.\n"
