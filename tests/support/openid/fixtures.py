"""Fixtures of an OpenID provider, and of a gateway whose people it signs in."""

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from gateway.intake.keys.key_file import KeyFile
from gateway.sign_in.signing_in import CALLBACK_PATH
from shared.bus.memory import MemoryBus
from tests.support import PATIENCE_S
from tests.support.deployment.processes import free_port
from tests.support.gateway.http import SECRET, LiveGateway, live_gateway
from tests.support.openid.provider import (
    CLIENT_ID,
    CLIENT_SECRET,
    OpenIdProvider,
    openid_provider,
)
from tests.support.workers.scripted_worker import ScriptedWorker

PEOPLE = {
    "olga": {"email": "olga@example.com", "groups": ["staff", "llm-operators"]},
    "rene": {"email": "rene@example.com", "groups": ["research"]},
    "stranger": {"email": "stranger@example.com", "groups": ["visitors"]},
}
ROLES = {
    "llm-operators": {"tenant": "ops", "scopes": ["generate", "cancel", "operator"]},
    "research": {"tenant": "lab"},
}
AUDIENCE = "https://warren.example/api"


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenIdProvider]:
    """A provider, for whose answers a gateway waits as long as a test."""
    monkeypatch.setattr("gateway.sign_in.provider._TIMEOUT_S", PATIENCE_S)
    with openid_provider(PEOPLE) as provider:
        yield provider


@pytest.fixture
def described(provider: OpenIdProvider) -> dict[str, Any]:
    """The content of the file that describes the provider."""
    url = f"http://127.0.0.1:{free_port()}"
    provider.redirect_uri = f"{url}{CALLBACK_PATH}"
    return {
        "issuer": provider.url,
        "client_id": CLIENT_ID,
        "client_secret": CLIENT_SECRET,
        "url": url,
        "audience": AUDIENCE,
        "roles": ROLES,
    }


@pytest.fixture
def sign_in_options(described: dict[str, Any], tmp_path: Path) -> Mapping[str, Any]:
    """The settings of a gateway with this provider."""
    file = tmp_path / "oidc.json"
    file.write_text(json.dumps(described))
    keys = KeyFile(tmp_path / "keys")
    keys.add("program")
    port = urlsplit(described["url"]).port
    return {"port": port, "secret": SECRET, "keys_file": keys.path, "oidc_file": file}


@pytest.fixture
async def signing_in(
    bus: MemoryBus, worker: ScriptedWorker, sign_in_options: Mapping[str, Any]
) -> AsyncIterator[LiveGateway]:
    async with live_gateway(bus, **sign_in_options) as gateway:
        yield gateway
