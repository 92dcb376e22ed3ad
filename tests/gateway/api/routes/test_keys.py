"""API keys that operators manage over HTTP, at several gateways that share a database."""

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gateway.intake.keys.api_key import id_of
from gateway.intake.keys.key_file import KeyFile
from gateway.store.tenants.keys import StoredKeys
from shared.bus.memory import MemoryBroker
from tests.support.gateway.http import LiveGateway, eventually, two_gateways

KEYS = "/admin/v1/keys"


class Pair(NamedTuple):
    first: LiveGateway
    second: LiveGateway
    operator: str

    async def ask(self, method: str, path: str = "", **body: Any) -> Any:
        headers = {"authorization": f"Bearer {self.operator}"}
        more: Any = {"json": body} if method == "POST" else {}
        answer = await self.first.http.request(method, f"{KEYS}{path}", headers=headers, **more)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def refused(self, method: str, path: str = "", **body: Any) -> tuple[int, Any]:
        headers = {"authorization": f"Bearer {self.operator}"}
        more: Any = {"json": body} if method == "POST" else {}
        answer = await self.first.http.request(method, f"{KEYS}{path}", headers=headers, **more)
        return answer.status_code, answer.json()["error"]


async def status_with(gateway: LiveGateway, key: str) -> int:
    answer = await gateway.http.get("/v1/models", headers={"authorization": f"Bearer {key}"})
    return answer.status_code


async def is_answered(gateway: LiveGateway, key: str, status: int) -> None:
    """Wait until requests with the key have this status."""

    async def has_status() -> bool:
        return await status_with(gateway, key) == status

    await eventually(has_status)


@pytest.fixture
async def pair(broker: MemoryBroker, migrated_file: Path, tmp_path: Path) -> AsyncIterator[Pair]:
    shutil.copy(migrated_file, tmp_path)
    file = KeyFile(tmp_path / "keys")
    operator = file.add("ops", scopes=("operator",))
    async with two_gateways(broker, data_dir=tmp_path, keys_file=file.path) as (first, second):
        yield Pair(first, second, operator)


async def test_a_key_is_valid_at_all_gateways_from_its_creation_to_its_revocation(
    pair: Pair,
) -> None:
    made = await pair.ask("POST", tenant="alice", label="Web app", expires="2999-01-31")
    at_first = await status_with(pair.first, made["key"])
    await is_answered(pair.second, made["key"], 200)
    revoked = await pair.ask("DELETE", f"/{made['id']}")
    then_at_first = await status_with(pair.first, made["key"])
    await is_answered(pair.second, made["key"], 401)

    assert id_of(made["key"]) == made["id"]
    assert (made["tenant"], made["label"], made["source"]) == ("alice", "Web app", "database")
    assert (at_first, then_at_first) == (200, 401)
    assert revoked == {
        "object": "api_key.deleted",
        "id": made["id"],
        "tenant": "alice",
        "deleted": True,
    }


async def test_keys_of_file_and_database_are_listed_without_their_secrets(pair: Pair) -> None:
    made = await pair.ask("POST", tenant="alice")
    listed = (await pair.ask("GET"))["data"]
    of_alice = (await pair.ask("GET", "?tenant=alice"))["data"]

    assert [(key["tenant"], key["source"]) for key in listed] == [
        ("ops", "file"),
        ("alice", "database"),
    ]
    assert [key["id"] for key in of_alice] == [made["id"]]
    assert "key" not in listed[1]


async def test_limits_are_changed_and_unset(pair: Pair) -> None:
    made = await pair.ask("POST", tenant="alice", max_tokens=9, requests_per_minute=5)
    changed = await pair.ask("POST", f"/{made['id']}", max_tokens=7, unset=["requests_per_minute"])
    known = (await pair.ask("GET", "?tenant=alice"))["data"]

    assert (changed["max_tokens"], changed["requests_per_minute"]) == (7, None)
    assert known == [changed]


async def test_a_rotated_key_is_replaced_at_once_without_a_grace(pair: Pair) -> None:
    made = await pair.ask("POST", tenant="alice")
    new = await pair.ask("POST", f"/{made['id']}/rotate", grace_seconds=0)

    assert new["id"] == made["id"]
    assert await status_with(pair.first, new["key"]) == 200
    assert await status_with(pair.first, made["key"]) == 401


async def test_a_request_asks_the_database_for_no_key(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await pair.ask("POST", tenant="alice")
    await is_answered(pair.second, made["key"], 200)
    monkeypatch.setattr(StoredKeys, "__init__", None)
    monkeypatch.setattr(StoredKeys, "all", None)
    monkeypatch.setattr(StoredKeys, "change", None)

    assert await status_with(pair.second, made["key"]) == 200
    assert await status_with(pair.second, "wk-00-unknown") == 401


async def test_keys_of_the_file_are_changed_in_the_file(pair: Pair) -> None:
    path = f"/{id_of(pair.operator)}"

    for method, more in (("DELETE", ""), ("POST", "/rotate")):
        status, error = await pair.refused(method, f"{path}{more}")
        assert (status, error["code"]) == (409, "conflict")


async def test_the_examples_of_the_document_are_answered(pair: Pair) -> None:
    paths = (await pair.first.http.get("/openapi.json")).json()["paths"]
    made = await pair.ask("POST", tenant="alice")

    bodies = (path for path in paths if "requestBody" in paths[path].get("post", {}))
    for path in (path for path in bodies if path.startswith(KEYS)):
        body = paths[path]["post"]["requestBody"]["content"]["application/json"]
        await pair.ask("POST", path.removeprefix(KEYS).format(key_id=made["id"]), **body["example"])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "tenant"),
        ({"tenant": "a b"}, "tenant"),
        ({"tenant": "alice", "scopes": ["all"]}, "scopes"),
        ({"tenant": "alice", "expires": "soon"}, "expires"),
        ({"tenant": "alice", "expires": "2020-01-31"}, "expires"),
        ({"tenant": "alice", "models": ["a b"]}, "models"),
        ({"tenant": "alice", "max_tokens": 0}, "max_tokens"),
        ({"tenant": "alice", "label": 'a"b'}, "label"),
    ],
)
async def test_bad_fields_are_named(pair: Pair, body: dict[str, Any], param: str) -> None:
    status, error = await pair.refused("POST", **body)

    assert (status, error["param"]) == (400, param)


async def test_unknown_keys_are_not_found(pair: Pair) -> None:
    for method, path in (("DELETE", "/ab"), ("POST", "/ab/rotate")):
        status, error = await pair.refused(method, path)
        assert (status, error["code"]) == (404, "not_found")
