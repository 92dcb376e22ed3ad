"""``warren usage`` against a real gateway."""

import csv
import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cli import gateway_client
from cli.main import app
from cli.manage.usage import _COUNTS, _SECONDS, _table
from gateway.intake.keys.key_file import KeyFile
from shared.errors import StartupError
from tests.support.gateway.serving import served


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served() as url:
        yield url


def run(*arguments: str, typed: str = "", exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, arguments, input=typed, catch_exceptions=False)
    assert result.exit_code == exit_code, result.output
    return result.stdout


def test_the_table_has_a_column_for_each_number(url: str) -> None:
    shown = run("usage", "--url", url, "--since", "2026-01-01", "--until", "2026-01-31")

    assert "from 2026-01-01 00:00 until 2026-02-01 00:00 UTC" in " ".join(shown.split())


def test_the_last_of_all_days_can_be_the_last_day(url: str) -> None:
    shown = run("usage", "--url", url, "--until", "9999-12-31")

    assert "until 9999-12-31 23:59 UTC" in " ".join(shown.split())


def test_tokens_are_shown_beside_long_names_in_80_columns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    numbers = dict.fromkeys((*_COUNTS, *_SECONDS), 123_456_789)
    names = {"tenant": "department-of-linguistics", "model": "HuggingFaceTB/SmolLM2-135M-Instruct"}
    row = {**numbers, **names, "api_key_id": None, "day": None, "cost": 12.5}
    report = {"data": [row], "start_time": 0, "end_time": 1, "currency": "EUR"}

    Console(width=80).print(_table(report))

    shown = capsys.readouterr().out
    assert "…" not in shown
    assert shown.count("123,456,789") == 3
    assert "left out at this width: cached answers, takeovers, queue seconds" in shown


def test_csv_can_be_piped(url: str) -> None:
    shown = run("usage", "--all", "--by", "tenant,day", "--csv", "--url", url)

    rows = list(csv.reader(io.StringIO(shown)))
    assert rows[0][:3] == ["tenant", "day", "requests"]


@pytest.mark.parametrize(("typed", "exit_code"), [("y\n", 0), ("n\n", 1)])
def test_erasing_asks_first(url: str, typed: str, exit_code: int) -> None:
    shown = run("usage", "erase", "alice", "--url", url, typed=typed, exit_code=exit_code)

    assert ("0 records deleted" in shown) == (exit_code == 0)


def test_erasing_does_not_ask_without_the_scope(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys")
    key = keys.add("alice")
    with served(keys_file=str(keys.path)) as url, pytest.raises(StartupError, match="operator"):
        run("usage", "erase", "alice", "--url", url, "--api-key", key, typed="y\n")


def test_an_erasure_may_take_longer_than_other_requests(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_client, "_SILENCE_S", 1e-6)

    shown = run("usage", "erase", "alice", "--url", url, "--yes")

    assert "0 records deleted" in shown


def test_a_date_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="--since: soon is not a date"):
        run("usage", "--since", "soon")


@pytest.mark.parametrize(
    "options",
    [("--url", "http://other"), ("--api-key", "k"), ("--since", "2026-01-01"), ("--all",)],
)
def test_an_option_before_the_subcommand_is_refused(url: str, options: tuple[str, ...]) -> None:
    with pytest.raises(StartupError, match=f"{options[0]} before erase: .* come after it"):
        run("usage", *options, "erase", "alice", "--yes", "--url", url)


def test_a_key_of_the_environment_is_no_option_before_the_subcommand(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")

    assert "0 records deleted" in run("usage", "erase", "alice", "--yes", "--url", url)
