"""Settings become options and a table, without a loss, and the API key is read."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from cli.main import app
from cli.options import chosen, chosen_key, table, takes_settings
from shared import settings
from shared.errors import StartupError
from shared.settings import CommonSettings, GatewaySettings, WorkerSettings


def run(*args: str, env: dict[str, str] | None = None) -> str:
    """The arguments of a command with the gateway's settings and an option of its own."""
    app = typer.Typer()

    @app.command()
    @takes_settings(GatewaySettings)
    def command(own: str = "", **options: str) -> None:
        loaded = settings.load(GatewaySettings, **options)
        print(own, loaded.host, loaded.port, loaded.cors_origins, loaded.allow_anonymous)

    result = CliRunner().invoke(app, args, env=env, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout.strip()


def test_an_option_sets_a_setting() -> None:
    assert run("--own=x", "--port=9000") == "x 127.0.0.1 9000 () False"


def test_an_option_wins_over_the_variable() -> None:
    shown = run("--port=9000", env={"WARREN_PORT": "7000", "WARREN_HOST": "::1"})

    assert shown.split() == ["::1", "9000", "()", "False"]


def test_a_list_is_written_with_commas() -> None:
    assert run("--cors-origins=a,b").endswith("('a', 'b') False")


@pytest.mark.parametrize(
    ("args", "variable", "is_allowed"),
    [
        (["--allow-anonymous", "--host", "0.0.0.0"], None, True),
        (["--no-allow-anonymous"], "true", False),
        ([], "true", True),
        ([], None, False),
    ],
)
def test_a_boolean_setting_is_a_pair_of_flags(
    args: list[str], variable: str | None, is_allowed: bool
) -> None:
    env = {} if variable is None else {"WARREN_ALLOW_ANONYMOUS": variable}

    assert run(*args, env=env).endswith(str(is_allowed))


def test_each_side_gets_its_own_options() -> None:
    options = {"port": "1", "model": "m", "log_level": "info"}

    assert chosen(GatewaySettings, options) == {"port": "1", "log_level": "info"}
    assert chosen(WorkerSettings, options) == {"model": "m", "log_level": "info"}


def test_a_command_has_only_the_options_that_it_uses() -> None:
    app = typer.Typer()

    @app.command()
    @takes_settings(CommonSettings, only=("broker", "log_level"))
    def command(**options: str) -> None:
        print(*options)

    assert CliRunner().invoke(app, []).stdout.split() == ["broker", "log_level"]
    assert CliRunner().invoke(app, ["--log-format=json"]).exit_code == 2


@pytest.mark.parametrize("cls", [CommonSettings, GatewaySettings, WorkerSettings])
def test_the_table_has_a_row_for_each_setting(cls: type[CommonSettings]) -> None:
    rows = table().splitlines()

    for name in cls.model_fields:
        assert len([row for row in rows if row.startswith(f"| `WARREN_{name.upper()}` |")]) == 1


def test_each_setting_says_what_it_means() -> None:
    assert [row for row in table().splitlines() if row.endswith("|  |")] == []


def test_whitespace_around_an_api_key_is_not_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b" wk-1-x\r\n")

    assert chosen_key("wk-1-x\r", None) == "wk-1-x"
    assert chosen_key("\n wk-1-x\n", None) == "wk-1-x"
    assert chosen_key("wk-2-y", tmp_path / "key") == "wk-1-x"
    assert chosen_key(" \n", None) is None


@pytest.mark.parametrize("key", ["wk-1\rx", "wk 1-x", "wk-1-\u00fc", "wk-1-x\u200b", "wk\x1b[2J"])
def test_an_api_key_that_no_header_can_contain_is_refused_and_not_shown(
    key: str, tmp_path: Path
) -> None:
    (tmp_path / "key").write_bytes(key.encode())

    with pytest.raises(StartupError, match=r"^the API key of --api-key or OPENAI_API_KEY") as given:
        chosen_key(key, None)
    with pytest.raises(StartupError, match=r"^the API key in .*key contains") as read:
        chosen_key(None, tmp_path / "key")

    assert not any("wk" in str(refused.value) for refused in (given, read))


@pytest.mark.parametrize("command", ["status", "chat", "doctor"])
def test_no_command_shows_an_api_key_with_a_control_character(command: str) -> None:
    result = CliRunner().invoke(
        app, [command, "--url", "http://127.0.0.1:1"], env={"OPENAI_API_KEY": "wk-1-sec\rret"}
    )

    assert isinstance(result.exception, StartupError)
    assert "API key" in str(result.exception)
    assert "wk-1" not in f"{result.output}{result.exception}"
