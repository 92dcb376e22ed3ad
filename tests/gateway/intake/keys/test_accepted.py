"""API keys: the requests that a gateway accepts, and the file that it reads."""

import logging
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from gateway.intake.keys.accepted import Keys
from gateway.intake.keys.key_file import KeyFile, read_keys
from gateway.server import listen
from shared import settings
from shared.bus.memory import MemoryBus
from shared.errors import InvalidApiKey, StartupError
from shared.settings import GatewaySettings
from tests.support.gateway.http import chat_body, eventually, live_gateway
from tests.support.workers.scripted_worker import ScriptedWorker

CHAT = "/v1/chat/completions"


@pytest.fixture
def file(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "keys")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_a_key_is_its_tenants_until_it_is_revoked(file: KeyFile) -> None:
    alice, bob = file.add("alice"), file.add("bob")
    keys = Keys(file.path)
    assert keys.find(f"Bearer {alice}").tenant == "alice"
    assert keys.find(f"bearer {bob}").tenant == "bob"

    file.revoke(alice.split("-")[1])

    assert [key.tenant for key in read_keys(file.path).values()] == ["bob"]
    with pytest.raises(InvalidApiKey):
        Keys(file.path).find(f"Bearer {alice}")


@pytest.mark.parametrize(
    "wrong",
    [
        lambda key: "",
        lambda key: "Bearer",
        lambda key: f"Basic {key}",
        lambda key: key,
        lambda key: f"Bearer {key}x",
        lambda key: f"Bearer {key[:-1]}",
        lambda key: f"Bearer wk-{'0' * 10}-{key.split('-', 2)[2]}",
        lambda key: "Bearer none",
    ],
)
def test_nothing_else_is_let_in(file: KeyFile, wrong: "type[str]") -> None:
    key = file.add("alice")

    with pytest.raises(InvalidApiKey):
        Keys(file.path).find(wrong(key))


@pytest.mark.parametrize(
    ("header", "message"),
    [("", "API key is required"), ("Bearer wk-0-x", "Incorrect API key provided")],
)
def test_a_missing_key_is_distinguished_from_a_wrong_one(
    file: KeyFile, header: str, message: str
) -> None:
    file.add("alice")

    with pytest.raises(InvalidApiKey, match=message):
        Keys(file.path).find(header)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_without_keys_a_gateway_is_this_machines_alone(host: str, file: KeyFile) -> None:
    file.add("alice")
    open_to_all = settings.load(GatewaySettings, host=host, port=0)

    with pytest.raises(StartupError, match="--keys-file"), listen(open_to_all):
        pass

    for way_out in ({"keys_file": file.path}, {"allow_anonymous": "true"}, {"host": "127.0.0.1"}):
        chosen = settings.load(GatewaySettings, **{"host": host, "port": 0, **way_out})
        with listen(chosen):
            pass


async def test_a_request_needs_a_key_and_is_its_tenants(
    bus: MemoryBus, worker: ScriptedWorker, file: KeyFile
) -> None:
    key = file.add("alice")
    async with live_gateway(bus, keys_file=file.path) as gateway:
        refused = await gateway.http.post(CHAT, json=chat_body())
        taken = await gateway.http.post(CHAT, json=chat_body(), headers=bearer(key))
        wrong = await gateway.http.post(CHAT, json=chat_body(), headers=bearer(key[:-1]))

    # LiteLLM looks for these words.
    assert "Incorrect API key provided" in wrong.json()["error"]["message"]
    assert refused.status_code == wrong.status_code == 401
    assert refused.json()["error"]["code"] == "invalid_api_key"
    assert refused.json()["error"]["type"] == "invalid_request_error"
    assert refused.headers["www-authenticate"] == "Bearer"
    assert refused.headers["x-request-id"]
    assert taken.status_code == 200
    assert [job.job.tenant for job in worker.jobs] == ["alice"]


async def test_probes_and_documentation_need_no_key_and_everything_else_does(
    bus: MemoryBus, file: KeyFile
) -> None:
    file.add("alice")
    async with live_gateway(bus, keys_file=file.path) as gateway:
        for path in ("/live", "/health", "/metrics", "/docs", "/openapi.json"):
            assert (await gateway.http.get(path)).status_code == 200
        for path in (
            "/v1/models",
            "/nowhere",
            "/v1/streams/x",
            "//v1/models",
            "/docs/../v1/models",
        ):
            assert (await gateway.http.get(path)).status_code == 401
        assert await gateway.sample("warren_gateway_errors_total") == 5


async def test_health_has_details_for_a_key_with_the_scope_metrics_alone(
    bus: MemoryBus, worker: ScriptedWorker, file: KeyFile
) -> None:
    scraper, user = file.add("prometheus", scopes=("metrics",)), file.add("alice")
    async with live_gateway(bus, keys_file=file.path) as gateway:

        async def health(headers: dict[str, str]) -> Any:
            answer = await gateway.http.get("/health", headers=headers)
            assert answer.status_code == 200
            return answer.json()

        async def are_models_listed() -> bool:
            return "scripted" in (await health(bearer(scraper)))["models"]

        await eventually(are_models_listed)
        assert "scripted" in (await health({"x-api-key": scraper}))["models"]
        for headers in ({}, bearer(user), bearer("wk-0-x"), {"Authorization": scraper}):
            assert await health(headers) == {"status": "ok"}


def id_of(key: str) -> str:
    return key.split("-")[1]


async def test_a_key_lacks_what_is_not_among_its_scopes(
    bus: MemoryBus, worker: ScriptedWorker, file: KeyFile
) -> None:
    reader = bearer(file.add("alice", scopes=("generate",)))
    scraper = bearer(file.add("prometheus", scopes=("metrics",)))
    async with live_gateway(bus, keys_file=file.path) as gateway:

        async def status(method: str, path: str, headers: dict[str, str]) -> int:
            return (await gateway.http.request(method, path, headers=headers)).status_code

        for method, path, headers in (
            ("DELETE", "/v1/streams/x", reader),
            ("POST", "/v1/responses/x/cancel", reader),
            ("GET", "/metrics", reader),
            ("GET", "/admin/anything", reader),
            ("GET", "/v1/models", scraper),
        ):
            assert await status(method, path, headers) == 403
        refused = await gateway.http.get("/v1/models", headers=scraper)
        assert refused.json()["error"]["code"] == "insufficient_permissions"
        assert await status("GET", "/v1/models", reader) == 200
        assert await status("GET", "/metrics", scraper) == 200
        assert await status("GET", "/metrics", {}) == 401


@pytest.mark.parametrize(("is_open_to_all", "status"), [(False, 404), (True, 403)])
async def test_without_keys_only_this_machine_operates_the_gateway(
    bus: MemoryBus, is_open_to_all: bool, status: int
) -> None:
    async with live_gateway(bus, allow_anonymous=is_open_to_all) as gateway:
        assert (await gateway.http.get("/admin/nothing")).status_code == status


def test_an_expired_key_is_refused(file: KeyFile) -> None:
    key = file.add("alice")
    file.path.write_text(f"{file.path.read_text().rstrip()} expires=2026-01-31")

    with pytest.raises(InvalidApiKey, match="expired"):
        Keys(file.path).find(f"Bearer {key}")


def test_a_rotated_key_is_valid_until_its_grace_has_passed(file: KeyFile) -> None:
    old = file.add("alice", requests_per_minute=7)

    new = file.rotate(id_of(old), timedelta(hours=1))

    both = [Keys(file.path).find(f"Bearer {key}") for key in (old, new)]
    assert {(key.key_id, key.requests_per_minute) for key in both} == {(id_of(old), 7)}
    newest = file.rotate(id_of(old), timedelta(0))
    assert Keys(file.path).find(f"Bearer {newest}")
    with pytest.raises(InvalidApiKey):
        Keys(file.path).find(f"Bearer {new}")


async def test_the_file_is_read_again_when_it_changes(bus: MemoryBus, file: KeyFile) -> None:
    early = file.add("alice")
    async with live_gateway(bus, keys_look_s=0.0, keys_file=file.path) as gateway:

        async def status(key: str) -> int:
            return (await gateway.http.get("/v1/models", headers=bearer(key))).status_code

        late = file.add("bob")
        assert await status(late) == 200
        newest = file.rotate(id_of(late), timedelta(0))
        assert (await status(late), await status(newest)) == (401, 200)
        file.revoke(id_of(early))
        assert await status(early) == 401


async def test_a_broken_file_leaves_the_last_good_keys_and_says_so(
    bus: MemoryBus, file: KeyFile, caplog: pytest.LogCaptureFixture
) -> None:
    key = file.add("alice")
    async with live_gateway(bus, keys_look_s=0.0, keys_file=file.path) as gateway:
        for broken in (b"broken", b"\xff", None):
            if broken is None:
                file.path.unlink()
            else:
                file.path.write_bytes(broken)
            answer = await gateway.http.get("/v1/models", headers=bearer(key))
            assert answer.status_code == 200
            assert await gateway.sample("warren_gateway_keys_file_broken") == 1
        errors = [one for one in caplog.records if one.levelno == logging.ERROR]
        assert [one.message for one in errors] == ["API keys not reloaded"] * 3

        new = file.add("alice")
        assert (await gateway.http.get("/v1/models", headers=bearer(new))).status_code == 200
        assert await gateway.sample("warren_gateway_keys_file_broken") == 0


def test_a_revocation_takes_effect_although_the_file_is_broken(file: KeyFile) -> None:
    alice, bob, carol = (file.add(name) for name in ("alice", "bob", "carol"))
    keys = Keys(file.path, look_interval_s=0.0)
    of_alice, of_bob, _ = file.path.read_text().splitlines()

    file.path.write_text(f"{of_alice}\n{of_bob} scopes=everything\n")

    assert keys.find(f"Bearer {alice}").tenant == "alice"
    assert keys.find(f"Bearer {bob}").scopes == ("generate", "cancel")
    with pytest.raises(InvalidApiKey):
        keys.find(f"Bearer {carol}")


def test_without_a_valid_line_nothing_is_revoked(file: KeyFile) -> None:
    alice, bob = (file.add(name) for name in ("alice", "bob"))
    keys = Keys(file.path, look_interval_s=0.0)
    of_alice, _ = file.path.read_text().splitlines()

    file.path.write_text(f"{of_alice} scopes=everything\n")

    assert [keys.find(f"Bearer {key}").tenant for key in (alice, bob)] == ["alice", "bob"]
    assert keys.is_broken


class Comparisons:
    """`hmac.compare_digest`, which takes the same time for all strings of equal lengths, and the
    lengths that it was given."""

    def __init__(self) -> None:
        self.lengths: list[tuple[int, int]] = []

    def __call__(self, given: str, expected: str) -> bool:
        self.lengths.append((len(given), len(expected)))
        return given == expected


def test_comparing_a_wrong_key_takes_as_long_as_a_right_one(
    file: KeyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = file.add("alice")
    keys = Keys(file.path)
    lengths = []
    for given in (key, f"{key[:-1]}\N{BULLET}", f"wk-{id_of(key)}-x", "wk-0-x"):
        comparisons = Comparisons()
        monkeypatch.setattr("hmac.compare_digest", comparisons)
        with suppress(InvalidApiKey):
            keys.find(f"Bearer {given}")
        lengths.append(comparisons.lengths)

    assert lengths == [[(64, 64), (64, 64)]] * 4


def test_a_file_without_keys_is_a_warning(file: KeyFile, caplog: pytest.LogCaptureFixture) -> None:
    file.path.touch()
    Keys(file.path)
    file.add("alice")
    Keys(file.path)

    assert [record.message for record in caplog.records] == [
        "there is no API key yet, so no request is accepted"
    ]
