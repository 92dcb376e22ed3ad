"""The command ``warren keys``."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.manage.keys import app
from gateway.intake.keys.accepted import Keys
from gateway.intake.keys.key_file import KeyFile
from shared.errors import InvalidApiKey, StartupError
from tests.support.gateway.serving import served

RUNNER = CliRunner()


def run(path: Path, *words: str) -> str:
    result = RUNNER.invoke(app, [*words, "--keys-file", str(path)])
    if result.exception is not None:
        raise result.exception
    return result.stdout.strip()


def test_a_key_is_added_listed_rotated_and_revoked(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    options = ["--label", "Web app", "--scopes", "generate", "--requests-per-minute", "9"]
    key = run(path, "add", "alice", *options)
    key_id = key.split("-")[1]
    assert Keys(path).find(f"Bearer {key}").requests_per_minute == 9

    new = run(path, "rotate", key_id, "--grace-hours", "0")
    listed = run(path, "list")
    run(path, "revoke", key_id)

    assert new != key
    assert listed.startswith(f"{key_id}  alice  ")
    assert listed.endswith('label="Web app" scopes=generate requests_per_minute=9')
    with pytest.raises(InvalidApiKey):
        Keys(path).find(f"Bearer {new}")


def test_a_key_that_cannot_be_recorded_is_not_changed(tmp_path: Path) -> None:
    path, audit_file = tmp_path / "keys", ["--audit-file", str(tmp_path / "no" / "audit.jsonl")]
    key_id = run(path, "add", "alice").split("-")[1]
    before = path.read_text()

    for words in (["add", "bob"], ["rotate", key_id], ["revoke", key_id]):
        with pytest.raises(StartupError, match="audit log"):
            run(path, *words, *audit_file)

    assert path.read_text() == before


def test_each_change_is_recorded_with_tenant_and_key_id(tmp_path: Path) -> None:
    path = tmp_path / "keys"

    def recorded(*words: str) -> str:
        return run(path, *words, "--audit-file", str(tmp_path / words[0]))

    key_id = recorded("add", "alice").split("-")[1]
    recorded("rotate", key_id)
    recorded("revoke", key_id)

    for word, act in (("add", "added"), ("rotate", "rotated"), ("revoke", "revoked")):
        record = json.loads((tmp_path / word).read_text().splitlines()[0])
        assert record["act"] == f"API key {act}"
        assert (record["tenant"], record["key_id"]) == ("alice", key_id)


def test_a_user_without_a_name_is_recorded_by_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # a container without this user
    audit_file = tmp_path / "audit.jsonl"

    key = run(tmp_path / "keys", "add", "alice", "--audit-file", str(audit_file))

    assert key.startswith("wk-")
    assert json.loads(audit_file.read_text())["by"] == str(os.getuid())


def test_an_option_that_is_no_value_of_its_field_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="scopes=all: 'all' is not one of generate"):
        run(tmp_path / "keys", "add", "alice", "--scopes", "all")


def test_a_key_that_would_never_be_valid_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="--expires 2020-01-31 is in the past"):
        run(tmp_path / "keys", "add", "alice", "--expires", "2020-01-31")

    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize("hours", ["inf", "nan", "1e8", "-1", "87600.1"])
def test_a_grace_that_is_no_time_up_to_ten_years_is_refused(hours: str, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    key_id = run(path, "add", "alice").split("-")[1]
    before = path.read_text()

    with pytest.raises(StartupError, match=r"--grace-hours: \S+ is not from 0 to 87600"):
        run(path, "rotate", key_id, "--grace-hours", hours)

    assert path.read_text() == before
    run(path, "rotate", key_id, "--grace-hours", "87600")


@pytest.mark.parametrize("time", ["9999-12-31T23:59:59-12:00", "0001-01-01T00:00:00+12:00"])
def test_an_expiry_outside_the_years_1_to_9999_in_utc_is_refused(time: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"expires=\S+: expected a year from 1 to 9999 in UTC"):
        run(tmp_path / "keys", "add", "alice", "--expires", time)

    assert not (tmp_path / "keys").exists()


def test_a_key_of_the_database_is_managed_at_a_gateway(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys")
    operator = file.add("ops", scopes=("operator",))

    with served(keys_file=str(file.path)) as url:

        def run_there(*words: str) -> str:
            result = RUNNER.invoke(app, [*words, "--url", url, "--api-key", operator])
            if result.exception is not None:
                raise result.exception
            return result.stdout.strip()

        key = run_there("add", "alice", "--models", "m,n*", "--expires", "2999-01-31")
        key_id = key.split("-")[1]
        new = run_there("rotate", key_id, "--grace-hours", "0")
        changed = run_there("change", key_id, "--max-tokens", "7", "--unset", "expires")
        listed = run_there("list").splitlines()
        run_there("revoke", key_id)
        left = run_there("list").splitlines()

    assert new != key
    assert changed.startswith(f"{key_id}  alice  ")
    assert changed.endswith("scopes=generate,cancel models=m,n* max_tokens=7 source=database")
    assert listed[1] == changed
    assert len(left) == 1
    assert left[0].endswith("source=file")
