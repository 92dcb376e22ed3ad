"""Operators who end the work of tenants."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gateway.intake.keys.api_key import id_of
from gateway.intake.keys.key_file import KeyFile
from shared.bus.memory import MemoryBus
from tests.support.gateway.batches import chat, jsonl
from tests.support.gateway.http import LiveGateway, chat_body, eventually, live_gateway
from tests.support.workers.scripted_worker import MODEL, ScriptedWorker, start_only


class Deployment(NamedTuple):
    gateway: LiveGateway
    alice: dict[str, str]
    operator: dict[str, str]
    key_id: str
    """That of alice's key."""

    async def as_operator(self, method: str, path: str) -> Any:
        answer = await self.gateway.http.request(method, f"/admin/v1{path}", headers=self.operator)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def streams(self) -> list[Any]:
        return list((await self.as_operator("GET", "/streams"))["data"])

    def chat(self, **more: Any) -> "asyncio.Task[Any]":
        body = chat_body(**more)
        asked = self.gateway.http.post("/v1/chat/completions", json=body, headers=self.alice)
        return asyncio.create_task(asked)

    async def until_running(self) -> Any:
        async def is_running() -> bool:
            return [one["state"] for one in await self.streams()] == ["running"]

        await eventually(is_running)
        [stream] = await self.streams()
        return stream

    async def detached(self) -> str:
        body = {"model": MODEL, "input": "one two", "background": True}
        answer = await self.gateway.http.post("/v1/responses", json=body, headers=self.alice)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    async def until_gone(self, response_id: str) -> None:
        async def is_gone() -> bool:
            path = f"/v1/responses/{response_id}"
            return (await self.gateway.http.get(path, headers=self.alice)).status_code == 404

        await eventually(is_gone)

    async def ordered(self) -> str:
        lines = jsonl([chat(f"line-{k}") for k in range(3)])
        file = await self.gateway.http.post(
            "/v1/files",
            files={"file": ("lines.jsonl", lines)},
            data={"purpose": "batch"},
            headers=self.alice,
        )
        order = {
            "input_file_id": file.json()["id"],
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
        batch = await self.gateway.http.post("/v1/batches", json=order, headers=self.alice)
        assert batch.status_code == 200, batch.text
        return str(batch.json()["id"])

    async def until_batch_is(self, batch_id: str, status: str) -> None:
        async def has_it() -> bool:
            batches = (await self.as_operator("GET", "/batches"))["data"]
            known = {one["batch"]["id"]: one["batch"]["status"] for one in batches}
            return known.get(batch_id) == status

        await eventually(has_it)


@pytest.fixture
async def deployment(
    bus: MemoryBus, worker: ScriptedWorker, tmp_path: Path
) -> AsyncIterator[Deployment]:
    """A deployment whose worker begins each job and ends none."""
    worker.script = start_only
    file = KeyFile(tmp_path / "keys")
    alice, operator = file.add("alice"), file.add("ops", scopes=("operator",))
    async with live_gateway(
        bus,
        settled_s=0.0,  # the keys do not change
        keys_file=file.path,
        disconnect_grace_s=60,
    ) as gateway:
        yield Deployment(gateway, bearer(alice), bearer(operator), id_of(alice))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_an_operator_cancels_a_stream_of_any_tenant(
    deployment: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    asked = deployment.chat(stream=True)
    stream = await deployment.until_running()

    with caplog.at_level(logging.INFO, logger="warren.audit"):
        await deployment.as_operator("DELETE", f"/streams/{stream['id']}")

    assert stream["tenant"] == "alice"
    assert "cancelled" in (await asked).text
    audited = [vars(one)["audit"] for one in caplog.records if one.name == "warren.audit"]
    assert any(stream["id"] in str(one) and one["tenant"] == "ops" for one in audited)


async def test_an_operator_cancels_a_detached_request(deployment: Deployment) -> None:
    response_id = await deployment.detached()

    await deployment.as_operator("DELETE", f"/streams/{response_id}")

    await deployment.until_gone(response_id)


async def test_an_operator_cancels_a_batch(deployment: Deployment) -> None:
    batch_id = await deployment.ordered()
    await deployment.until_batch_is(batch_id, "in_progress")

    stopped = await deployment.as_operator("POST", f"/batches/{batch_id}/cancel")

    assert (stopped["tenant"], stopped["batch"]["id"]) == ("alice", batch_id)
    await deployment.until_batch_is(batch_id, "cancelled")


async def test_the_work_of_a_key_ends_with_it(deployment: Deployment) -> None:
    asked = deployment.chat(stream=True)
    await deployment.until_running()
    response_id = await deployment.detached()
    batch_id = await deployment.ordered()
    await deployment.until_batch_is(batch_id, "in_progress")

    stopped = await deployment.as_operator("POST", f"/keys/{deployment.key_id}/stop-work")

    assert stopped["num_batches"] == 1
    assert stopped["num_detached"] >= 1
    assert "cancelled" in (await asked).text
    await deployment.until_batch_is(batch_id, "cancelled")

    await deployment.until_gone(response_id)


async def test_the_work_of_other_keys_goes_on(deployment: Deployment) -> None:
    asked = deployment.chat(stream=True)
    await deployment.until_running()

    await deployment.as_operator("POST", "/keys/00ff/stop-work")

    assert (await deployment.until_running())["tenant"] == "alice"
    asked.cancel()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/streams"),
        ("DELETE", "/streams/chatcmpl-00000000000000000000000000000000"),
        ("GET", "/batches"),
        ("POST", "/batches/batch_1/cancel"),
        ("POST", "/keys/00aa/stop-work"),
        ("GET", "/models"),
        ("DELETE", "/models/m"),
    ],
)
async def test_tenants_may_not(deployment: Deployment, method: str, path: str) -> None:
    answer = await deployment.gateway.http.request(
        method, f"/admin/v1{path}", headers=deployment.alice
    )

    assert answer.status_code == 403
