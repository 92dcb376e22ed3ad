"""The doctor's findings about a gateway, which may run on another machine."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.doctor.gateway import _ready, _version, check_gateway
from cli.doctor.web import Fetched
from cli.main import app
from gateway.intake.keys.key_file import KeyFile
from shared.settings import variable
from tests.support.gateway.serving import served
from tests.support.workers.scripted_worker import MODEL


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "keys")


@pytest.fixture
def url(keys: KeyFile) -> Iterator[str]:
    """A gateway that requires a key."""
    keys.add("first")
    with served(keys_file=keys.path) as url:
        yield url


def statuses(url: str, api_key: str | None) -> dict[str, str]:
    return {finding.check: finding.status for finding in check_gateway(url, api_key)}


def answer(code: int, **body: Any) -> Fetched:
    return Fetched(code, {}, json.dumps(body).encode())


def test_a_gateway_is_well_with_an_operators_key(keys: KeyFile) -> None:
    key = keys.add("ops", scopes=("generate", "operator"))
    with served(keys_file=keys.path) as url:
        findings = {finding.check: finding for finding in check_gateway(f"{url}/v1/", key)}

    assert {finding.status for finding in findings.values()} == {"ok"}
    assert set(findings) == {"gateway", "ready", "clock", "API key", "models", "version"}
    assert MODEL in findings["models"].detail


def test_the_version_is_for_operators(keys: KeyFile) -> None:
    key = keys.add("alice")
    with served(keys_file=keys.path) as url:
        found = statuses(url, key)

    assert (found["API key"], found["models"], found["version"]) == ("ok", "ok", "skipped")


@pytest.mark.parametrize(("key", "status"), [(None, "warning"), ("wk-1-x", "failure")])
def test_a_gateway_that_refuses_the_key_is_checked_as_far_as_possible(
    url: str, key: str | None, status: str
) -> None:
    assert statuses(url, key) == {"gateway": "ok", "ready": "ok", "clock": "ok", "API key": status}


def test_a_gateway_without_keys_needs_none() -> None:
    with served() as url:
        assert set(statuses(url, None).values()) == {"ok"}


def test_with_a_url_alone_this_machine_is_not_checked(
    keys: KeyFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(variable("data_dir"))
    (tmp_path / "key").write_text(f"{keys.add('ops', scopes=('generate', 'operator'))}\n")
    with served(keys_file=keys.path) as url:
        options = ["--url", url, "--api-key-file", str(tmp_path / "key"), "--json"]
        done = CliRunner().invoke(app, ["doctor", *options], catch_exceptions=False)

    found = json.loads(done.stdout)
    assert done.exit_code == 0
    assert [(one["check"], one["status"]) for one in found if one["subject"] == "machine"] == [
        ("settings", "skipped")
    ]
    assert {one["status"] for one in found if one["subject"] == "gateway"} == {"ok"}


def test_another_version_is_a_warning() -> None:
    finding = _version(answer(200, gateway={"version": "0.0.1"}))

    assert finding.status == "warning"
    assert finding.detail.startswith("0.0.1 at the gateway")


@pytest.mark.parametrize(
    ("health", "why"),
    [
        (answer(503, status="broker_unavailable"), "broker_unavailable"),
        (answer(502), "/health is answered 502"),
    ],
)
def test_a_gateway_that_takes_no_requests_says_why(health: Fetched, why: str) -> None:
    finding = _ready(health)

    assert finding.status == "failure"
    assert finding.detail.endswith(why)


def test_another_server_is_no_gateway() -> None:
    (finding,) = check_gateway("ftp://127.0.0.1", None)

    assert (finding.check, finding.status) == ("gateway", "failure")


def test_a_gateway_that_does_not_answer_is_named_with_its_scheme() -> None:
    (finding,) = check_gateway("127.0.0.1:1/v1", None)

    assert finding.detail == "http://127.0.0.1:1 does not answer: Connection refused"
