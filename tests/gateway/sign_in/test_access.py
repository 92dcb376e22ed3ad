"""The file that says who may sign in, and as what."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.sign_in.access import Access
from shared import settings
from shared.errors import StartupError
from shared.settings import GatewaySettings

FILE: dict[str, Any] = {
    "issuer": "https://login.example/realms/staff",
    "client_id": "warren",
    "client_secret": "what nobody else may read",
    "url": "https://warren.example",
    "roles": {
        "operators": {"tenant": "ops", "scopes": ["generate", "operator"]},
        "staff": {"tenant": "staff"},
    },
}


def role_of(claims: dict[str, Any], **changes: Any) -> str | None:
    access = msgspec.convert({**FILE, **changes}, Access)
    person = access.person_of({"sub": "olga", **claims})
    return None if person is None else person.role


def test_the_first_role_of_the_file_that_the_claims_give_counts() -> None:
    assert role_of({"groups": ["staff", "operators"]}) == "operators"
    assert role_of({"groups": "staff"}) == "staff"
    assert role_of({"groups": ["others", 7, None]}) is None
    assert role_of({}) is None


def test_a_claim_may_be_inside_of_others_or_have_a_dot_in_its_name() -> None:
    inside = {"realm_access": {"roles": ["staff"]}}
    assert role_of(inside, claim="realm_access.roles") == "staff"
    assert role_of({"realm_access": "staff"}, claim="realm_access.roles") is None
    assert role_of({"https://a.example/b": ["staff"]}, claim="https://a.example/b") == "staff"


def test_an_address_counts_once_the_provider_has_verified_it() -> None:
    by_email: dict[str, Any] = {
        "claim": "email",
        "roles": {"olga@example.com": {"tenant": "ops"}, "*": {"tenant": "guests"}},
    }
    claims = {"email": "olga@example.com"}
    assert role_of({**claims, "email_verified": True}, **by_email) == "olga@example.com"
    assert role_of({**claims, "email_verified": False}, **by_email) == "*"
    assert role_of(claims, **by_email) == "*"


def test_people_of_different_providers_are_different_people() -> None:
    claims = {"sub": "1", "groups": ["staff"], "email": "a@example.com"}
    ids = set()
    for issuer in ("https://one.example", "https://other.example"):
        person = msgspec.convert({**FILE, "issuer": issuer}, Access).person_of(claims)
        assert person is not None
        assert person.name == "a@example.com"
        ids.add(person.id)
    assert len(ids) == 2


def loaded(tmp_path: Path, content: str, **options: Any) -> Access | None:
    file = tmp_path / "oidc.json"
    file.write_text(content)
    options = {"keys_file": tmp_path / "keys", **options}
    return Access.of(settings.load(GatewaySettings, oidc_file=file, **options))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"issuer": "http://login.example"}, "issuer: expected an https:// URL"),
        ({"issuer": "https://login.example?a=b"}, "issuer: expected an https:// URL"),
        ({"url": "https://warren.example/console"}, "url: expected no path"),
        ({"url": "http://warren.example"}, "url: expected an https:// URL"),
        ({"scope": "profile"}, "scope: expected openid"),
        ({"audience": "warren"}, "audience: expected another value"),
        ({"roles": {}}, "length >= 1"),
        ({"roles": {"staff": {"tenant": "two words"}}}, "matching regex"),
        ({"roles": {"staff": {"tenant": "a", "scopes": ["root"]}}}, "Invalid enum value 'root'"),
        ({"session_hours": 0}, "> 0"),
        ({"secret": "misspelt"}, "unknown field `secret`"),
    ],
)
def test_a_file_with_a_fault_stops_the_start_with_its_reason(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(StartupError) as stopped:
        loaded(tmp_path, json.dumps({**FILE, **changes}))

    assert reason in str(stopped.value)
    assert str(tmp_path / "oidc.json") in str(stopped.value)
    assert FILE["client_secret"] not in str(stopped.value)


def test_what_is_no_json_and_what_has_no_keys_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="does not describe an OpenID provider"):
        loaded(tmp_path, "issuer: https://login.example")
    with pytest.raises(StartupError, match="WARREN_KEYS_FILE"):
        loaded(tmp_path, json.dumps(FILE), keys_file=None)


def test_the_clients_secret_is_in_no_text_of_the_file() -> None:
    assert FILE["client_secret"] not in repr(msgspec.convert(FILE, Access))
