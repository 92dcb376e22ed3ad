"""``warren tenants`` against a real gateway."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.main import app
from gateway.intake.keys.key_file import KeyFile
from shared.errors import RequestError
from tests.support.gateway.serving import served


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served(settled_s=0.0) as url:
        yield url


def run(*arguments: str, typed: str = "", exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, arguments, input=typed, catch_exceptions=False)
    assert result.exit_code == exit_code, result.output
    return result.stdout


@pytest.mark.parametrize(("typed", "exit_code"), [("y\n", 0), ("n\n", 1)])
def test_erasing_asks_first(url: str, typed: str, exit_code: int) -> None:
    shown = run("tenants", "erase", "alice", "--url", url, typed=typed, exit_code=exit_code)

    assert ("0 rows of files deleted" in shown) == (exit_code == 0)


def test_limits_are_changed_shown_and_listed(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys")
    key = keys.add("ops", scopes=("operator",))
    with served(settled_s=0.0, key=key, keys_file=str(keys.path)) as url:
        options = ("--url", url, "--api-key", key)
        run("tenants", "limits", "alice", "--tokens-per-minute", "5000", *options)
        changed = run("tenants", "limits", "alice", "--max-concurrent", "3", *options)
        run("tenants", "limits", "alice", "--unset", "max-concurrent", *options)
        shown = run("tenants", "limits", "alice", *options)
        listed = run("tenants", "list", *options)

    assert "tokens_per_minute: 0/5,000\n" in changed
    assert "max_concurrent: 0/3\n" in changed
    assert "max_concurrent: -\n" in shown
    assert "alice" in listed
    assert "0/5,000" in listed


def test_the_keys_of_the_tenant_are_named(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys")
    operator = keys.add("ops", scopes=("operator",))
    with (
        served(keys_file=str(keys.path)) as url,
        pytest.raises(RequestError, match="API keys in force"),
    ):
        run("tenants", "erase", "ops", "--yes", "--url", url, "--api-key", operator)
