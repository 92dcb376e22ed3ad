"""What the doctor says of an OpenID provider, which runs in this process."""

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
from joserfc.jwk import RSAKey
from typer.testing import CliRunner

from cli.doctor.findings import Finding
from cli.doctor.sign_in import check_sign_in
from cli.main import app
from shared.settings import GatewaySettings
from tests.support.deployment.processes import free_port
from tests.support.openid.provider import OpenIdProvider


def found(options: Mapping[str, Any], **described: Any) -> Finding:
    """What is found with another description of the provider."""
    file = options["oidc_file"]
    file.write_text(json.dumps({**json.loads(file.read_text()), **described}))
    (finding,) = check_sign_in(GatewaySettings(**options))
    return finding


def test_a_provider_that_knows_the_gateway_is_well(sign_in_options: Mapping[str, Any]) -> None:
    finding = found(sign_in_options)

    assert (finding.status, finding.remedy) == ("ok", "")
    assert "has 1 keys, and knows warren" in finding.detail


def test_the_command_asks_the_provider(sign_in_options: Mapping[str, Any]) -> None:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in sign_in_options.items()]

    done = CliRunner().invoke(app, ["doctor", *options], catch_exceptions=False)

    assert re.search(r"^ok +sign-in +http://localhost:\d+ answers", done.stdout, re.MULTILINE)


def test_without_a_provider_nothing_is_checked(sign_in_options: Mapping[str, Any]) -> None:
    options = {**sign_in_options, "oidc_file": None}
    assert list(check_sign_in(GatewaySettings(**options))) == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"issuer": f"http://localhost:{free_port()}"}, "cannot be used: http://localhost:"),
        ({"client_secret": "of another client"}, "refuses the client or its secret"),
        ({"client_id": "nobody"}, "refuses the client or its secret (invalid_client)"),
        ({"issuer": "ftp://login.example"}, "does not describe an OpenID provider"),
    ],
)
def test_a_wrong_description_is_named(
    sign_in_options: Mapping[str, Any], wrong: dict[str, Any], message: str
) -> None:
    finding = found(sign_in_options, **wrong)

    assert finding.status == "failure"
    assert message in finding.detail
    assert finding.remedy


@pytest.mark.parametrize(
    ("published", "status", "message"),
    [
        ({"issuer": "https://login.example"}, "failure", "calls itself 'https://login.example'"),
        ({"jwks_uri": None}, "failure", "openid-configuration cannot be read: Expected `str`"),
        ({"token_endpoint": "http://localhost:1/token"}, "failure", "answers no requests for"),
        (
            {"id_token_signing_alg_values_supported": ["HS256"]},
            "failure",
            "signs with HS256, which a gateway does not accept",
        ),
        ({"code_challenge_methods_supported": ["plain"]}, "warning", "PKCE with S256"),
    ],
)
def test_what_a_provider_says_of_itself_is_checked(
    sign_in_options: Mapping[str, Any],
    provider: OpenIdProvider,
    published: dict[str, Any],
    status: str,
    message: str,
) -> None:
    provider.published = published

    finding = found(sign_in_options)

    assert finding.status == status
    assert message in finding.detail


def test_keys_that_sign_nothing_are_not_enough(
    sign_in_options: Mapping[str, Any], provider: OpenIdProvider
) -> None:
    provider.key = RSAKey.import_key({**provider.key.as_dict(private=True), "use": "enc"})

    finding = found(sign_in_options)

    assert finding.status == "failure"
    assert "/jwks has no key for signatures" in finding.detail
