"""What a gateway writes into the audit log."""

import json
import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gateway.intake.keys.api_key import id_of
from gateway.intake.keys.key_file import KeyFile
from shared.bus.memory import MemoryBus
from shared.telemetry import floods
from shared.telemetry.floods import MAX_LINES
from tests.support.gateway.http import chat_body, live_gateway
from tests.support.workers.scripted_worker import ScriptedWorker

SAID = "a prompt that nobody else may read"


def audited(caplog: pytest.LogCaptureFixture) -> list[tuple[str, dict[str, Any]]]:
    records = [one for one in caplog.records if one.name == "warren.audit"]
    return [(one.message, getattr(one, "audit", {})) for one in records]


async def test_refusals_and_operators_requests_are_recorded_and_no_prompts(
    bus: MemoryBus, worker: ScriptedWorker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "warren.audit")
    file = KeyFile(tmp_path / "keys")
    user, operator = file.add("alice"), file.add("ops", scopes=("operator",))
    body = chat_body(messages=[{"role": "user", "content": SAID}])
    async with live_gateway(bus, keys_file=file.path) as gateway:

        async def send(method: str, path: str, key: str) -> None:
            headers = {"authorization": f"Bearer {key}"}
            await gateway.http.request(method, path, json=body, headers=headers)

        await send("POST", "/v1/chat/completions", user)
        await send("POST", "/v1/chat/completions", f"{user}x")
        await send("POST", f"/v1/chat/completions?prompt={SAID}", "wk-ffff-nobody")
        await send("GET", "/admin/nothing", user)
        await send("GET", "/admin/v1/status", operator)
        await send("POST", "/admin/nothing", operator)
        await gateway.http.get(f"/v1/streams/chatcmpl-{'0' * 32}?token=1.{'0' * 32}")

    records = audited(caplog)
    told = [(act, fact["tenant"], fact["key_id"], fact["path"]) for act, fact in records]
    of_alice, of_ops = ("alice", user.split("-")[1]), ("ops", operator.split("-")[1])
    assert told == [
        ("login refused", *of_alice, "/v1/chat/completions"),
        ("login refused", "", "", "/v1/chat/completions"),
        ("access refused", *of_alice, "/admin/nothing"),
        ("operator's request", *of_ops, "/admin/nothing"),
        ("login refused", "", "", f"/v1/streams/chatcmpl-{'0' * 32}"),
    ]
    written = json.dumps(records)
    assert not any(secret in written for secret in (SAID, user.split("-", 2)[2], "nobody"))


async def test_anonymous_refusals_do_not_hide_those_of_a_known_key_nor_fill_the_log(
    bus: MemoryBus,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(floods, "WINDOW_S", 3600.0)  # all lines come within a window
    caplog.set_level(logging.INFO)
    file = KeyFile(tmp_path / "keys")
    stolen = {"authorization": f"Bearer {file.add('alice')}"}
    async with live_gateway(bus, keys_file=file.path) as gateway:
        for number in range(200):
            await gateway.http.get("/v1/models")
            if number % 20 == 0:
                await gateway.http.get("/admin/v1/status", headers=stolen)

    acts = [(act, fact["tenant"]) for act, fact in audited(caplog)]
    assert acts.count(("access refused", "alice")) == 10
    assert acts.count(("login refused", "")) == MAX_LINES
    lines = [getattr(one, "tenant", "") for one in caplog.records if one.name == "warren.jobs"]
    assert (lines.count("alice"), len(lines)) == (10, 10 + MAX_LINES)


async def test_refusals_of_revoked_and_expired_keys_name_them(
    bus: MemoryBus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "warren.audit")
    file = KeyFile(tmp_path / "keys")
    revoked, other = file.add("alice"), file.add("bob")
    expired = file.add("carol", expires=datetime(2026, 1, 1, tzinfo=UTC))
    async with live_gateway(bus, keys_look_s=0.0, keys_file=file.path) as gateway:
        file.revoke(id_of(revoked))
        for key in (revoked, expired, f"{revoked}x", "wk-ffff-nobody"):
            headers = {"authorization": f"Bearer {key}"}
            assert (await gateway.http.get("/v1/models", headers=headers)).status_code == 401
        path = f"/v1/streams/chatcmpl-{'0' * 32}?token=1.{'0' * 32}"
        await gateway.http.get(path, headers={"authorization": f"Bearer {other}"})

    records = [record for record in audited(caplog) if record[0] == "login refused"]
    assert [(facts["tenant"], facts["key_id"]) for _, facts in records] == [
        ("alice", id_of(revoked)),
        ("carol", id_of(expired)),
        ("alice", id_of(revoked)),
        ("", ""),
        ("bob", id_of(other)),
    ]
    written = json.dumps(records)
    assert not any(key.split("-", 2)[2] in written for key in (revoked, expired, other))


async def test_changes_of_the_keys_are_recorded(
    bus: MemoryBus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "warren.audit")
    file = KeyFile(tmp_path / "keys")
    old, rotated = (file.add(name).split("-")[1] for name in ("alice", "bob"))
    async with live_gateway(bus, keys_look_s=0.0, keys_file=file.path) as gateway:
        file.revoke(old)
        file.rotate(rotated, timedelta(hours=1))
        new = file.add("carol").split("-")[1]
        await gateway.http.get("/metrics")

    acts = [("alice", old, "revoked"), ("bob", rotated, "changed"), ("carol", new, "added")]
    assert sorted(audited(caplog), key=str) == sorted(
        [
            ("API key changed", {"tenant": tenant, "key_id": key_id, "change": change})
            for tenant, key_id, change in acts
        ],
        key=str,
    )
