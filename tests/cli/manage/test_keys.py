"""The command ``warren keys``."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.manage.keys import app
from gateway.intake.api_keys import Keys
from shared.errors import InvalidApiKey, StartupError

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


def test_an_option_that_is_no_value_of_its_field_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="scopes=all: 'all' is not one of generate"):
        run(tmp_path / "keys", "add", "alice", "--scopes", "all")
