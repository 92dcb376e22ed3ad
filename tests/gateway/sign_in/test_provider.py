"""What a gateway believes of an OpenID provider, and how often it asks."""

import base64
import hashlib
import hmac
import json
import time
from typing import Any

import msgspec
import pytest

from gateway.sign_in.access import Access
from gateway.sign_in.provider import IdentityProvider, NotVerified
from shared.errors import Unavailable
from tests.support.deployment.processes import free_port
from tests.support.openid.provider import (
    CLIENT_ID,
    OpenIdProvider,
    new_key,
    openid_provider,
    unsigned,
)

NONCE = "the nonce of this sign-in"
RIGHT = {"sub": "olga", "aud": CLIENT_ID, "nonce": NONCE}


@pytest.fixture
def access(described: dict[str, Any]) -> Access:
    return msgspec.convert(described, Access)


@pytest.fixture
def asked(access: Access, provider: OpenIdProvider) -> IdentityProvider:
    return IdentityProvider(access, provider.redirect_uri, pause_s=0)


async def test_claims_are_those_of_this_sign_in_alone(
    asked: IdentityProvider, provider: OpenIdProvider
) -> None:
    shared = {"aud": [CLIENT_ID, "another"], "azp": CLIENT_ID}
    for right in ({}, {"aud": [CLIENT_ID]}, shared, {"exp": int(time.time()) - 10}):
        token = provider.sign(**{**RIGHT, **right})
        assert (await asked.claims_of(token, CLIENT_ID, NONCE))["sub"] == "olga"

    wrong: list[dict[str, Any]] = [
        {"nonce": "of another sign-in"},
        {"nonce": None},
        {"iss": "https://evil.example"},
        {"iss": None},
        {"aud": "another"},
        {"aud": None},
        {"aud": [CLIENT_ID, "another"]},
        {"aud": [CLIENT_ID, "another"], "azp": "another"},
        {"azp": "another"},
        {"exp": int(time.time()) - 3600},
        {"exp": None},
        {"nbf": int(time.time()) + 3600},
        {"sub": 7},
        {"sub": None},
    ]
    for changes in wrong:
        with pytest.raises(NotVerified):
            await asked.claims_of(provider.sign(**{**RIGHT, **changes}), CLIENT_ID, NONCE)


def encoded(text: bytes) -> str:
    return base64.urlsafe_b64encode(text).rstrip(b"=").decode()


def signed_with_what_is_published(provider: OpenIdProvider, token: str) -> str:
    header = encoded(json.dumps({"alg": "HS256", "kid": provider.key.kid}).encode())
    text = f"{header}.{token.split('.')[1]}"
    secret = provider.key.as_pem(private=False)
    return f"{text}.{encoded(hmac.digest(secret, text.encode(), hashlib.sha256))}"


async def test_only_the_providers_signature_counts(
    asked: IdentityProvider, provider: OpenIdProvider
) -> None:
    token = provider.sign(**RIGHT)
    header, payload, signature = token.split(".")
    others = encoded(json.dumps({**RIGHT, "iss": provider.url, "exp": 1 << 40}).encode())
    forged = [
        unsigned(token),
        signed_with_what_is_published(provider, token),
        f"{header}.{others}.{signature}",
        f"{header}.{payload}.",
        "a.b.c",
        "",
    ]

    for one in forged:
        with pytest.raises(NotVerified):
            await asked.claims_of(one, CLIENT_ID, NONCE)


async def test_a_provider_may_change_its_keys(
    asked: IdentityProvider, provider: OpenIdProvider
) -> None:
    before = provider.sign(**RIGHT)
    await asked.claims_of(before, CLIENT_ID, NONCE)

    provider.key = new_key()

    await asked.claims_of(provider.sign(**RIGHT), CLIENT_ID, NONCE)
    with pytest.raises(NotVerified):
        await asked.claims_of(before, CLIENT_ID, NONCE)


async def test_strangers_do_not_decide_how_often_the_provider_is_asked(
    access: Access, provider: OpenIdProvider
) -> None:
    asked = IdentityProvider(access, provider.redirect_uri, pause_s=600)
    known, provider.key = provider.key, new_key()
    unknown, provider.key = provider.sign(**RIGHT), known

    for _ in range(20):
        with pytest.raises(NotVerified):
            await asked.claims_of(unknown, CLIENT_ID, NONCE)

    assert provider.requests == ["/.well-known/openid-configuration", "/jwks"]


async def test_known_keys_count_while_the_provider_is_away(described: dict[str, Any]) -> None:
    with openid_provider({}) as provider:
        access = msgspec.convert({**described, "issuer": provider.url}, Access)
        asked = IdentityProvider(access, provider.redirect_uri, pause_s=0)
        await asked.claims_of(provider.sign(**RIGHT), CLIENT_ID, NONCE)
        token = provider.sign(**RIGHT)
        known, provider.key = provider.key, new_key()
        of_new_key, provider.key = provider.sign(**RIGHT), known

    await asked.claims_of(token, CLIENT_ID, NONCE)
    with pytest.raises(NotVerified):
        await asked.claims_of(of_new_key, CLIENT_ID, NONCE)
    with pytest.raises(Unavailable):
        await asked.redeem("a code", NONCE, "a verifier")


async def test_a_provider_that_calls_itself_otherwise_is_not_believed(
    described: dict[str, Any], provider: OpenIdProvider, caplog: pytest.LogCaptureFixture
) -> None:
    issuer = provider.url.replace("localhost", "127.0.0.1")
    asked = IdentityProvider(msgspec.convert({**described, "issuer": issuer}, Access), "")

    with pytest.raises(Unavailable):
        await asked.page_for("a state", NONCE, "a verifier")

    reasons = [getattr(record, "reason", "") for record in caplog.records]
    assert f"it calls itself '{provider.url}', and not '{issuer}'" in reasons


async def test_a_provider_that_is_not_there_is_asked_once_in_a_while(
    described: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    issuer = f"http://localhost:{free_port()}"
    access = msgspec.convert({**described, "issuer": issuer}, Access)
    asked = IdentityProvider(access, "", pause_s=600)

    for _ in range(20):
        with pytest.raises(Unavailable):
            await asked.page_for("a state", NONCE, "a verifier")

    lines = [one for one in caplog.records if one.message == "OpenID provider not available"]
    assert len(lines) == 1
