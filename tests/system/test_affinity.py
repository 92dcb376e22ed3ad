"""A conversation on a real broker, whose worker is killed in the middle of a turn."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.deployment import processes
from tests.support.deployment.broker import Broker
from tests.support.deployment.processes import WarrenProcess
from tests.support.metrics import sample

pytestmark = [pytest.mark.rabbit, pytest.mark.timeout(300)]

NUM_WORKERS = 3
NUM_TOKENS = 60
HEARD = "warren_fleet_workers"
TAKEN = "warren_worker_near_jobs_total"


@dataclass
class Conversation:
    """Its messages, and how many tokens of each turn's prompt were cached."""

    messages: list[dict[str, str]] = field(default_factory=list)
    num_cached: list[int] = field(default_factory=list)

    async def turn(
        self, http: httpx.AsyncClient, disturb: Callable[[], Awaitable[object]] | None = None
    ) -> None:
        """Ask, read the answer, and ``disturb`` it once it has begun."""
        question = f"What is the answer to question {len(self.messages)}?"
        self.messages.append({"role": "user", "content": question})
        body = {
            "model": "echo",
            "messages": self.messages,
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "seed": 1,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        text = ""
        usage: dict[str, Any] = {}
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk: dict[str, Any] = json.loads(line.removeprefix("data: "))
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    text += choice["delta"].get("content") or ""
                if text and disturb is not None:
                    await disturb()
                    disturb = None
        assert usage["completion_tokens"] == NUM_TOKENS
        self.messages.append({"role": "assistant", "content": text})
        self.num_cached.append(usage["prompt_tokens_details"]["cached_tokens"])


async def test_a_conversation_keeps_its_worker_and_survives_it(
    broker: Broker, tmp_path: Path
) -> None:
    disturbed, undisturbed = Conversation(), Conversation()
    with ExitStack() as stack:
        workers = await asyncio.to_thread(started, broker, tmp_path, stack)
        gateway = await asyncio.to_thread(
            stack.enter_context,
            processes.gateway(broker.url_of("gateway"), tmp_path / "gateway"),
        )
        async with httpx.AsyncClient(base_url=gateway.url, timeout=240) as http:
            while await asyncio.to_thread(sample, gateway, HEARD) < NUM_WORKERS:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            for _ in range(4):
                await disturbed.turn(http)
            num_taken = [await asyncio.to_thread(sample, one, TAKEN) for one in workers]
            target = workers[num_taken.index(max(num_taken))]
            await disturbed.turn(http, lambda: asyncio.to_thread(target.kill))
            await disturbed.turn(http)  # published to the worker that is gone
            await disturbed.turn(http)
            for _ in disturbed.num_cached:
                await undisturbed.turn(http)

    assert sorted(num_taken) == [0, 0, 3]
    assert disturbed.num_cached[2] > NUM_TOKENS
    assert disturbed.num_cached[3] > 2 * NUM_TOKENS
    assert disturbed.messages == undisturbed.messages


def started(broker: Broker, folder: Path, stack: ExitStack) -> list[WarrenProcess]:
    url = broker.url_of("worker")
    workers = [
        processes.echo_worker(url, folder / f"worker{k}", "--step-ms=10")
        for k in range(NUM_WORKERS)
    ]
    for worker in workers:
        worker.start()
        stack.callback(worker.terminate)
    for worker in workers:
        worker.wait_healthy()
    return workers
