"""What operators do with tenants."""

import asyncio
import logging
import shutil
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest

from gateway.intake.keys.api_key import id_of
from gateway.intake.keys.key_file import KeyFile
from gateway.store.database import SQLITE_FILE
from gateway.store.schema import METADATA
from shared import topology
from shared.bus.base import Message
from shared.bus.memory import MemoryBus
from shared.messages import UsageRecord, encode
from tests.support.gateway.batches import ENDED, chat, jsonl
from tests.support.gateway.http import LiveGateway, chat_body, events, eventually, live_gateway
from tests.support.workers.jobs import dead_letter
from tests.support.workers.scripted_worker import MODEL, ScriptedJob, ScriptedWorker, start_only


class Tenants(NamedTuple):
    gateway: LiveGateway
    keys: KeyFile
    directory: Path
    alice: str
    """The key of each."""
    bob: str
    operator: str

    async def erase(self, tenant: str, key: str = "") -> tuple[int, Any]:
        headers = bearer(key or self.operator)
        answer = await self.gateway.http.delete(f"/admin/v1/tenants/{tenant}", headers=headers)
        return answer.status_code, answer.json()

    async def batches_end(self, key: str) -> None:
        """Wait until the batches of a key have ended."""

        async def have_ended() -> bool:
            answer = await self.gateway.http.get("/v1/batches", headers=bearer(key))
            return all(batch["status"] in ENDED for batch in answer.json()["data"])

        await eventually(have_ended)

    def stored(self) -> set[str]:
        """The tenants that any table names."""
        with closing(sqlite3.connect(self.directory / SQLITE_FILE)) as database:
            tables = [table.name for table in METADATA.sorted_tables if "tenant" in table.c]
            rows = [database.execute(f"SELECT tenant FROM {table}") for table in tables]
            return {tenant for found in rows for (tenant,) in found}

    def num_stored(self, table: str) -> int:
        with closing(sqlite3.connect(self.directory / SQLITE_FILE)) as database:
            (num,) = database.execute(f"SELECT count(*) FROM {table}").fetchone()
            return int(num)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


AT_ONCE = {"keys_look_s": 0.0, "settled_s": 0.2}
"""The gateways of these tests read their keys when they are asked."""


@pytest.fixture
async def tenants(
    bus: MemoryBus, worker: ScriptedWorker, migrated_file: Path, tmp_path: Path
) -> AsyncIterator[Tenants]:
    shutil.copy(migrated_file, tmp_path)
    file = KeyFile(tmp_path / "keys")
    alice, bob = file.add("alice"), file.add("bob")
    operator = file.add("ops", scopes=("operator",))
    async with live_gateway(bus, **AT_ONCE, data_dir=tmp_path, keys_file=file.path) as gateway:
        yield Tenants(gateway, file, tmp_path, alice, bob, operator)


async def limit(tenants: Tenants, tenant: str, **limits: Any) -> tuple[int, Any]:
    answer = await tenants.gateway.http.post(
        f"/admin/v1/tenants/{tenant}", json=limits, headers=bearer(tenants.operator)
    )
    return answer.status_code, answer.json()


async def test_the_limits_of_a_tenant_hold_for_all_its_keys(tenants: Tenants) -> None:
    other = tenants.keys.add("alice")
    _, described = await limit(tenants, "alice", requests_per_minute=2, max_detached=7)
    http, path = tenants.gateway.http, "/v1/chat/completions"
    answers = [
        await http.post(path, json=chat_body(), headers=bearer(key))
        for key in (tenants.alice, other, tenants.alice, tenants.bob)
    ]
    _, unlimited = await limit(tenants, "alice", unset=["requests_per_minute"])
    again = await http.post(path, json=chat_body(), headers=bearer(tenants.alice))

    assert (described["requests_per_minute"], described["max_detached"]) == (2, 7)
    assert [answer.status_code for answer in answers] == [200, 200, 429, 200]
    error = answers[2].json()["error"]
    assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
    assert "of the tenant alice" in error["message"]
    assert (unlimited["requests_per_minute"], unlimited["max_detached"]) == (None, 7)
    assert again.status_code == 200


async def test_tenants_are_listed_with_what_they_use(tenants: Tenants) -> None:
    await limit(tenants, "alice", tokens_per_minute=1000)
    await limit(tenants, "carol", max_concurrent=1)
    await tenants.gateway.http.post(
        "/v1/chat/completions", json=chat_body(), headers=bearer(tenants.alice)
    )
    listed = await tenants.gateway.http.get("/admin/v1/tenants", headers=bearer(tenants.operator))
    one = await tenants.gateway.http.get(
        "/admin/v1/tenants/alice", headers=bearer(tenants.operator)
    )

    alice, bob, carol, ops = listed.json()["data"]
    assert [row["tenant"] for row in (alice, bob, carol, ops)] == ["alice", "bob", "carol", "ops"]
    assert (alice["num_keys"], alice["num_requests"], alice["num_running"]) == (1, 1, 0)
    assert (bob["num_keys"], bob["num_requests"]) == (1, None)
    assert (carol["num_keys"], carol["max_concurrent"]) == (0, 1)
    assert one.json() == alice


@pytest.mark.parametrize(
    ("tenant", "body", "status"),
    [
        ("alice", {}, 400),
        ("alice", {"max_concurrent": 0}, 400),
        ("alice", {"unset": ["max_tokens"]}, 400),
        ("a%20b", {"max_concurrent": 1}, 400),
    ],
)
async def test_what_is_no_limit_is_refused(
    tenants: Tenants, tenant: str, body: dict[str, Any], status: int
) -> None:
    assert (await limit(tenants, tenant, **body))[0] == status


async def test_a_gateway_without_prices_refuses_a_budget(tenants: Tenants) -> None:
    status, refused = await limit(tenants, "alice", monthly_budget=1)

    assert (status, refused["error"]["code"]) == (409, "conflict")
    assert "WARREN_PRICES_FILE" in refused["error"]["message"]


async def test_the_example_of_the_document_is_answered_as_documented(tenants: Tenants) -> None:
    document = (await tenants.gateway.http.get("/openapi.json")).json()
    post = document["paths"]["/admin/v1/tenants/{tenant}"]["post"]
    example = post["requestBody"]["content"]["application/json"]["example"]

    status, described = await limit(tenants, "alice", **example)

    assert status == 200
    schema = post["responses"]["200"]["content"]["application/json"]["schema"]
    jsonschema.validate(described, schema)


async def use_everything(tenants: Tenants, key: str) -> None:
    """Store something of every kind over HTTP."""
    http, headers = tenants.gateway.http, bearer(key)
    upload = {"file": ("in.jsonl", jsonl([chat("one")]))}
    answers = [
        await http.post("/v1/files", files=upload, data={"purpose": "batch"}, headers=headers),
        await http.post("/v1/responses", json={"model": MODEL, "input": "one"}, headers=headers),
        await http.post("/v1/conversations", json={}, headers=headers),
    ]
    order = {
        "input_file_id": answers[0].json()["id"],
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }
    answers.append(await http.post("/v1/batches", json=order, headers=headers))
    assert [answer.status_code for answer in answers] == [200] * len(answers)


async def test_nothing_of_a_tenant_is_left(
    tenants: Tenants, bus: MemoryBus, caplog: pytest.LogCaptureFixture
) -> None:
    for name, key in (("alice", tenants.alice), ("bob", tenants.bob)):
        await use_everything(tenants, key)
        await dead_letter(bus, f"letter-of-{name}", name)
        webhook = {
            "url": "https://example.com/hook",
            "tenant": name,
            "event_types": ["batch.failed"],
        }
        await tenants.gateway.http.post(
            "/admin/v1/webhooks", json=webhook, headers=bearer(tenants.operator)
        )
    await tenants.batches_end(tenants.bob)
    tenants.keys.revoke(id_of(tenants.alice))

    with caplog.at_level(logging.INFO, "warren.audit"):
        status, erased = await tenants.erase("alice")
    _, again = await tenants.erase("alice")

    assert status == 200, erased
    assert (erased["tenant"], erased["num_dead_letters"]) == ("alice", 1)
    assert tenants.stored() == {"bob"}
    file_ids = {path.name for path in (tenants.directory / "files").iterdir()}
    assert len(file_ids) == tenants.num_stored("files")
    act = next(one for one in caplog.records if one.message == "tenant erased")
    assert vars(act)["audit"]["erased_tenant"] == "alice"
    letters = await tenants.gateway.http.get(
        "/admin/v1/dead-letters", headers=bearer(tenants.operator)
    )
    assert [letter["id"] for letter in letters.json()["data"]] == ["letter-of-bob"]
    assert set(again["num_rows"].values()) == {0}
    assert again["num_dead_letters"] == 0


async def test_a_tenant_with_a_key_in_force_is_not_erased(tenants: Tenants) -> None:
    await use_everything(tenants, tenants.alice)

    status, answer = await tenants.erase("alice")

    assert status == 409
    assert id_of(tenants.alice) in answer["error"]["message"]
    assert "alice" in tenants.stored()


async def test_only_operators_erase(tenants: Tenants) -> None:
    status, _ = await tenants.erase("bob", key=tenants.alice)

    assert status == 403


async def test_the_work_of_a_tenant_is_cancelled_first(
    tenants: Tenants, bus: MemoryBus, worker: ScriptedWorker
) -> None:
    is_running = asyncio.Event()

    async def say_one_word(job: ScriptedJob) -> None:
        await job.start()
        await job.say("one ")
        is_running.set()
        await start_only(job)

    worker.script = say_one_word
    stream = asyncio.create_task(
        tenants.gateway.http.post(
            "/v1/chat/completions", json=chat_body(stream=True), headers=bearer(tenants.alice)
        )
    )
    await is_running.wait()
    detached = await tenants.gateway.http.post(
        "/v1/responses",
        json={"model": MODEL, "input": "one", "background": True},
        headers=bearer(tenants.alice),
    )
    log = topology.reply_key(detached.json()["id"])
    tenants.keys.revoke(id_of(tenants.alice))

    status, erased = await tenants.erase("alice")

    assert status == 200, erased
    *_, last = events((await stream).text)
    assert last["error"]["code"] == "cancelled"
    assert await bus.inspect(log) is None
    assert "alice" not in tenants.stored()


async def test_the_logs_of_requests_that_have_ended_are_deleted(
    tenants: Tenants, bus: MemoryBus
) -> None:
    kept = await tenants.gateway.http.post(
        "/v1/chat/completions",
        json=chat_body(),
        headers={**bearer(tenants.alice), "Idempotency-Key": "k"},
    )
    request_id = kept.json()["id"]
    log = topology.reply_key(request_id)
    assert await bus.inspect(log) is not None
    record = UsageRecord(
        request_id=request_id,
        tenant="alice",
        model=MODEL,
        job_class="interactive",
        outcome="completed",
        ended_at=time.time(),
    )
    await bus.publish(topology.LEDGER_RECORDS.bindings[0], Message(encode(record)))
    tenants.keys.revoke(id_of(tenants.alice))

    async def is_recorded() -> bool:
        return tenants.num_stored("usage") == 1

    await eventually(is_recorded)
    _, erased = await tenants.erase("alice")

    assert erased["num_logs"] == 1
    assert await bus.inspect(log) is None
