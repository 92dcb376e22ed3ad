"""Workers with two numerics on a real broker, some of which are killed during their streams."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.deployment import processes
from tests.support.deployment.broker import Broker
from tests.support.deployment.processes import WarrenProcess

pytestmark = pytest.mark.rabbit

NUM_STREAMS = 8
BODY = {
    "model": "echo",
    "prompt": "Who goes on?",
    "max_tokens": 300,
    "ignore_eos": True,
    "stream": True,
}


class Fleet:
    """A gateway, and workers of the synthetic model with given numerics."""

    def __init__(self, broker: Broker, folder: Path, stack: ExitStack) -> None:
        self._broker = broker
        self._folder = folder
        self._stack = stack
        log = folder / "gateway"
        self.gateway = stack.enter_context(processes.gateway(broker.url_of("gateway"), log))

    def worker(self, name: str, numerics: str, step_ms: int = 10) -> WarrenProcess:
        options = (f"--step-ms={step_ms}", f"--numerics={numerics}")
        url, log = self._broker.url_of("worker"), self._folder / name
        return self._stack.enter_context(processes.echo_worker(url, log, *options))


class Stream:
    """A stream's chunks."""

    def __init__(self, lines: AsyncIterator[str]) -> None:
        self._lines = lines
        self._chunks: list[dict[str, Any]] = []

    @property
    def text(self) -> str:
        return "".join(choice["text"] for chunk in self._chunks for choice in chunk["choices"])

    @property
    def fingerprint(self) -> str:
        return str(self._chunks[-1]["system_fingerprint"])

    async def read(self, num_chunks: int | None = None) -> None:
        """Read so many chunks, or to the end."""
        while num_chunks is None or len(self._chunks) < num_chunks:
            line = await anext(self._lines)
            if line == "data: [DONE]":
                return
            if line.startswith("data: "):
                self._chunks.append(json.loads(line.removeprefix("data: ")))


@asynccontextmanager
async def stream(http: httpx.AsyncClient, seed: int) -> AsyncIterator[Stream]:
    async with http.stream("POST", "/v1/completions", json=BODY | {"seed": seed}) as response:
        response.raise_for_status()
        yield Stream(response.aiter_lines())


async def disturbed(
    http: httpx.AsyncClient, disturb: Callable[[], Awaitable[object]]
) -> list[Stream]:
    """All streams, read to their ends, which are disturbed once all have begun."""
    async with AsyncExitStack() as opened:
        streams = [
            await opened.enter_async_context(stream(http, seed)) for seed in range(NUM_STREAMS)
        ]
        await asyncio.gather(*(one.read(3) for one in streams))
        await disturb()
        await asyncio.gather(*(one.read() for one in streams))
    return streams


async def test_streams_stay_with_their_numerics_for_as_long_as_there_are_any(
    broker: Broker, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        fleet = await asyncio.to_thread(Fleet, broker, tmp_path, stack)
        first = await asyncio.to_thread(fleet.worker, "first", "a", step_ms=500)
        async with httpx.AsyncClient(base_url=fleet.gateway.url, timeout=240) as http:
            others: dict[str, WarrenProcess] = {}

            async def replace_first() -> None:
                others["other"] = await asyncio.to_thread(fleet.worker, "other", "b")
                # So slow that its answers have not ended when it is killed.
                others["second"] = await asyncio.to_thread(fleet.worker, "second", "a", step_ms=40)
                first.kill()

            moved = await disturbed(http, replace_first)
            changed = await disturbed(http, lambda: asyncio.to_thread(others["second"].kill))
            undisturbed = await disturbed(http, lambda: asyncio.sleep(0))

    assert [one.text for one in moved] == [one.text for one in undisturbed]
    assert {one.fingerprint for one in moved} == {"echo"}
    assert "job moved" in others["other"].log
    assert [one.text for one in changed] == [one.text for one in undisturbed]
    assert {one.fingerprint for one in changed} == {"echo", "echo-mixed"}
