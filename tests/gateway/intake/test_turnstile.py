"""Requests that wait for the limits of their key."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.intake.keys.api_key import id_of
from gateway.intake.keys.key_file import KeyFile, read_keys
from gateway.intake.limits import Limits
from gateway.intake.turnstile import Turnstile
from shared.bus.memory import MemoryBus
from shared.errors import QuotaExceeded, RateLimited
from tests.support.gateway.http import (
    LiveGateway,
    chat_body,
    eventually,
    live_gateway,
    running_limits,
)
from tests.support.workers.scripted_worker import (
    ScriptedWorker,
    repeat_the_prompt,
    start_only,
)

CHAT = "/v1/chat/completions"
WAITING = "warren_gateway_limit_waiting"
SOON_S = 0.05


@pytest.fixture
def file(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "keys")


@pytest.fixture
async def limits(bus: MemoryBus) -> AsyncIterator[Limits]:
    async with running_limits(Limits(bus, 10), bus) as limits:
        yield limits


async def ask(
    gateway: LiveGateway, headers: dict[str, str], on_limit: str = "wait", **more: Any
) -> httpx.Response:
    body = chat_body(on_limit=on_limit, **more)
    return await gateway.http.post(CHAT, json=body, headers=headers)


async def waits(gateway: LiveGateway, num_waiting: int) -> None:
    async def is_so() -> bool:
        return await gateway.sample(WAITING) == num_waiting

    await eventually(is_so)


@contextmanager
def busy(gateway: LiveGateway, worker: ScriptedWorker, key: str) -> Iterator[asyncio.Task[Any]]:
    """A request that runs until it is cancelled, while those after it would be answered."""
    worker.script = start_only
    running = asyncio.create_task(ask(gateway, {"authorization": f"Bearer {key}"}, "refuse"))
    try:
        yield running
    finally:
        running.cancel()


async def test_a_request_waits_until_another_of_its_key_has_ended(
    bus: MemoryBus, worker: ScriptedWorker, file: KeyFile
) -> None:
    key = file.add("alice", max_concurrent=1)
    headers = {"authorization": f"Bearer {key}"}
    async with live_gateway(bus, keys_file=file.path) as gateway:
        with busy(gateway, worker, key) as running:
            await worker.wait_until(lambda: bool(worker.jobs))
            worker.script = repeat_the_prompt
            refused = await ask(gateway, headers, "refuse")
            waiting = asyncio.create_task(ask(gateway, headers))
            await waits(gateway, 1)
            running.cancel()
            answer = await waiting
        await waits(gateway, 0)

    assert (refused.status_code, answer.status_code) == (429, 200)


async def test_a_detached_request_that_waits_holds_up_no_other_request(
    bus: MemoryBus, worker: ScriptedWorker, file: KeyFile
) -> None:
    headers = {"authorization": f"Bearer {file.add('alice', max_detached=1)}"}
    worker.script = start_only
    async with live_gateway(bus, keys_file=file.path) as gateway, asyncio.TaskGroup() as tasks:
        running = tasks.create_task(ask(gateway, headers, detach=True))
        await worker.wait_until(lambda: bool(worker.jobs))
        worker.script = repeat_the_prompt
        waiting = tasks.create_task(ask(gateway, headers, detach=True))
        await waits(gateway, 1)

        answer = await ask(gateway, headers)

        waiting.cancel()
        running.cancel()

    assert answer.status_code == 200


async def test_a_request_waits_until_its_deadline(
    bus: MemoryBus, worker: ScriptedWorker, file: KeyFile
) -> None:
    headers = {"authorization": f"Bearer {file.add('alice', requests_per_minute=1)}"}
    async with live_gateway(bus, keys_file=file.path) as gateway:
        first = await ask(gateway, headers)
        late = await ask(gateway, headers, timeout=SOON_S)

    assert (first.status_code, late.status_code) == (200, 429)
    assert "Limit 1, Used 1, Requested 1" in late.json()["error"]["message"]
    assert len(worker.jobs) == 1


async def test_a_client_that_leaves_waits_no_longer(
    bus: MemoryBus, worker: ScriptedWorker, file: KeyFile
) -> None:
    headers = {"authorization": f"Bearer {file.add('alice', requests_per_minute=1)}"}
    async with live_gateway(bus, keys_file=file.path) as gateway:
        await ask(gateway, headers)
        waiting = asyncio.create_task(ask(gateway, headers))
        await waits(gateway, 1)
        waiting.cancel()
        await waits(gateway, 0)

    assert len(worker.jobs) == 1


async def test_a_gateway_that_shuts_down_keeps_no_request_waiting(
    bus: MemoryBus, worker: ScriptedWorker, file: KeyFile
) -> None:
    headers = {"authorization": f"Bearer {file.add('alice', requests_per_minute=1)}"}
    async with live_gateway(bus, keys_file=file.path) as gateway:
        await ask(gateway, headers)
        waiting = asyncio.create_task(ask(gateway, headers))
        await waits(gateway, 1)
        gateway.server.stop()
        answer = await waiting

    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "The gateway is shutting down."


async def test_the_request_of_a_revoked_key_waits_no_longer(
    bus: MemoryBus, worker: ScriptedWorker, file: KeyFile
) -> None:
    headers = {"authorization": f"Bearer {file.add('alice', requests_per_minute=1)}"}
    (key_id,) = read_keys(file.path)
    async with live_gateway(bus, keys_file=file.path, keys_look_s=0.0) as gateway:
        await ask(gateway, headers)
        waiting = asyncio.create_task(ask(gateway, headers))
        await waits(gateway, 1)
        file.revoke(key_id)
        answer = await waiting

    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


async def test_a_request_of_a_key_whose_work_is_stopped_waits_no_longer(
    bus: MemoryBus, worker: ScriptedWorker, file: KeyFile
) -> None:
    key, operator = file.add("alice", requests_per_minute=1), file.add("ops", scopes=("operator",))
    headers, of_operator = ({"authorization": f"Bearer {one}"} for one in (key, operator))
    async with live_gateway(bus, keys_file=file.path, settled_s=0.0) as gateway:
        await ask(gateway, headers)
        waiting = asyncio.create_task(ask(gateway, headers))
        await waits(gateway, 1)
        await gateway.http.post(f"/admin/v1/keys/{id_of(key)}/stop-work", headers=of_operator)
        answer = await waiting

    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "cancelled")


@pytest.mark.parametrize(("num_bytes", "num_admitted"), [(100, 960), (1 << 20, 60)])
async def test_bodies_are_read_for_a_key_at_its_limits_only_so_often(
    num_bytes: int, num_admitted: int, file: KeyFile, limits: Limits
) -> None:
    file.add("alice", requests_per_minute=1)
    (key,) = read_keys(file.path).values()
    async with limits.admit(key) as grant:
        grant.note_published()
    num_read = 0

    with suppress(RateLimited):
        while True:
            with limits.attempt(key, waiting_bytes=num_bytes) as attempt:
                num_read += attempt.refusal is not None

    assert num_read == num_admitted


async def test_a_request_waits_although_many_of_its_key_are_refused(
    bus: MemoryBus, worker: ScriptedWorker, file: KeyFile
) -> None:
    key = file.add("alice", max_concurrent=1)
    headers = {"authorization": f"Bearer {key}"}
    async with live_gateway(bus, keys_file=file.path) as gateway:
        with busy(gateway, worker, key) as running:
            await worker.wait_until(lambda: bool(worker.jobs))
            worker.script = repeat_the_prompt
            for _ in range(100):
                await ask(gateway, headers, "refuse")
            waiting = asyncio.create_task(ask(gateway, headers))
            await waits(gateway, 1)
            running.cancel()
            answer = await waiting

    assert answer.status_code == 200


async def test_a_request_behind_another_says_so_at_its_deadline(
    limits: Limits, file: KeyFile
) -> None:
    file.add("alice", requests_per_minute=1)
    (key,) = read_keys(file.path).values()
    turnstile, refusals = Turnstile(limits, lambda: 100.0), asyncio.Queue[RateLimited]()
    async with AsyncExitStack() as stack:
        (await turnstile.admit(stack, lambda: key, 1, None)).note_published()
        first = asyncio.create_task(
            turnstile.admit(stack, lambda: key, 1, None, report=refusals.put_nowait)
        )
        await refusals.get()

        with pytest.raises(RateLimited, match="Other requests of this API key waited"):
            await turnstile.admit(stack, lambda: key, 1, None, until=100.0 + SOON_S)
        first.cancel()


async def test_only_a_quarter_of_the_requests_of_a_gateway_wait(
    bus: MemoryBus, worker: ScriptedWorker, file: KeyFile
) -> None:
    headers = {"authorization": f"Bearer {file.add('alice', requests_per_minute=1)}"}
    async with live_gateway(bus, keys_file=file.path, max_requests=8) as gateway:
        await ask(gateway, headers)
        waiting = [asyncio.create_task(ask(gateway, headers)) for _ in range(2)]
        await waits(gateway, 2)
        answer = await ask(gateway, headers)
        for one in waiting:
            one.cancel()

    assert answer.status_code == 429
    assert "Limit 1, Used 1, Requested 1" in answer.json()["error"]["message"]


async def test_nobody_waits_for_a_budget(bus: MemoryBus, file: KeyFile) -> None:
    def require_budget(tenant: str) -> None:
        raise QuotaExceeded("The budget is spent.", retry_after_s=1e6)

    file.add("alice", requests_per_minute=1)
    (key,) = read_keys(file.path).values()
    async with running_limits(Limits(bus, 10, require_budget=require_budget), bus) as limits:
        turnstile = Turnstile(limits)
        async with AsyncExitStack() as stack:
            with pytest.raises(QuotaExceeded):
                await turnstile.admit(stack, lambda: key, 1, None)
