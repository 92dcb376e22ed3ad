"""API keys: the content of the file, and the requests that a gateway accepts."""

from pathlib import Path

import pytest

from gateway.intake.api_keys import KeyFile, Keys
from gateway.server import listen
from shared import settings
from shared.bus.memory import MemoryBus
from shared.errors import InvalidApiKey, StartupError
from shared.settings import GatewaySettings
from tests.support.http import chat_body, live_gateway
from tests.support.scripted_worker import ScriptedWorker

CHAT = "/v1/chat/completions"


@pytest.fixture
def file(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "keys")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_a_key_is_its_tenants_until_it_is_revoked(file: KeyFile) -> None:
    alice, bob = file.add("alice"), file.add("bob")
    keys = Keys(file.path)
    assert keys.tenant_of(f"Bearer {alice}") == "alice"
    assert keys.tenant_of(f"bearer {bob}") == "bob"

    file.revoke(alice.split("-")[1])

    assert [key.tenant for key in file.read().values()] == ["bob"]
    with pytest.raises(InvalidApiKey):
        Keys(file.path).tenant_of(f"Bearer {alice}")


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
        Keys(file.path).tenant_of(wrong(key))


@pytest.mark.parametrize(
    ("header", "message"),
    [("", "API key is required"), ("Bearer wk-0-x", "Incorrect API key provided")],
)
def test_a_missing_key_is_told_from_a_wrong_one(file: KeyFile, header: str, message: str) -> None:
    file.add("alice")

    with pytest.raises(InvalidApiKey, match=message):
        Keys(file.path).tenant_of(header)


def test_the_file_does_not_hold_the_key_and_is_its_owners_alone(file: KeyFile) -> None:
    key = file.add("alice")

    assert key.split("-", 2)[2] not in file.path.read_text()
    assert file.path.stat().st_mode & 0o077 == 0


def test_remarks_survive_a_revocation(file: KeyFile) -> None:
    file.path.write_text("# of the web app\n\n")
    key = file.add("alice")

    file.revoke(key.split("-")[1])

    assert file.path.read_text() == "# of the web app\n\n"


@pytest.mark.parametrize("tenant", ["", "a b", "a#b", "ü", "x" * 129])
def test_a_tenant_must_have_a_name(file: KeyFile, tenant: str) -> None:
    with pytest.raises(StartupError):
        file.add(tenant)


@pytest.mark.parametrize("content", ["nonsense\n", "1234567890 alice 00 2026-11-21\n", b"\xff"])
def test_a_file_that_is_none_stops_the_start(file: KeyFile, content: str | bytes) -> None:
    file.path.write_bytes(content if isinstance(content, bytes) else content.encode())

    with pytest.raises(StartupError, match="keys"):
        Keys(file.path)


def test_an_unknown_key_cannot_be_revoked(file: KeyFile) -> None:
    file.add("alice")

    with pytest.raises(StartupError, match="00"):
        file.revoke("00")


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


async def test_the_file_is_read_again_when_it_changes_and_kept_when_it_breaks(
    bus: MemoryBus, file: KeyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_interval = "gateway.intake.api_keys._LOOK_INTERVAL_S"
    monkeypatch.setattr(look_interval, 1000.0)
    early = file.add("alice")
    async with live_gateway(bus, keys_file=file.path) as gateway:

        async def status(key: str) -> int:
            return (await gateway.http.get("/v1/models", headers=bearer(key))).status_code

        late = file.add("bob")
        assert await status(late) == 401
        monkeypatch.setattr(look_interval, 0.0)
        assert await status(late) == 200
        file.revoke(early.split("-")[1])
        assert await status(early) == 401
        file.path.write_text("broken")
        assert await status(late) == 200
