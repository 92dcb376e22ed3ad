"""What every command does in surroundings that are not as they should be: an error that names what
to correct, and never a traceback."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from typer.main import get_command

from cli.main import app
from shared.settings import CommonSettings, GatewaySettings, WorkerSettings, option
from tests.support.deployment.command import Ended, warren
from tests.support.gateway.serving import served
from tests.support.workers.scripted_worker import MODEL

ROOT = Path(__file__).parents[2]
ROOT_COMMAND: Any = get_command(app)
SECRETS = ("broker", "secret", "database_url", "engine_key")
"""The settings that ``file:PATH`` sets to the text of a file."""
SERVICES: dict[str, type[CommonSettings]] = {"gateway": GatewaySettings, "worker": WorkerSettings}
REQUEST = """{"custom_id": "a", "method": "POST", "url": "/v1/completions",
 "body": {"model": "MODEL", "prompt": "a"}}""".replace("\n", "").replace("MODEL", MODEL)
ELSEWHERE = "http://gateway.invalid:1"
"""The URL of no gateway. Unlike a loopback address, it is asked for through a proxy."""


def leaves(group: Any, *names: str) -> Iterator[tuple[str, ...]]:
    """All commands, each with the required arguments that it needs to begin."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from leaves(command, *names, name)
        else:
            yield (*names, name)


def parameters(names: tuple[str, ...]) -> dict[str, click.Parameter]:
    command: Any = ROOT_COMMAND
    for name in names:
        command = command.commands[name]
    return {parameter.name: parameter for parameter in command.params}


def with_arguments(names: tuple[str, ...], tmp_path: Path) -> list[str]:
    """A command line that lacks nothing that the command requires."""
    line = [*names]
    (tmp_path / "input").write_text(REQUEST)
    for name, parameter in parameters(names).items():
        if parameter.required and parameter.param_type_name == "argument":
            line.append(str(tmp_path / name) if names == ("batch",) else "x")
        elif parameter.required:
            line += [max(parameter.opts, key=len), "https://hook.invalid" if name == "to" else "x"]
        elif name in ("yes", "everyone"):
            line.append(max(parameter.opts, key=len))
    return line


COMMANDS = list(leaves(ROOT_COMMAND))
OF_GATEWAYS = [names for names in COMMANDS if "url" in parameters(names)]


def refused(*line: str, **env: str) -> str:
    """The error of a command that cannot do its work."""
    ended: Ended = warren(*line, **env)
    assert ended.returncode != 0, ended
    shown = ended.stderr + ended.stdout
    assert "Traceback" not in shown
    return shown


@pytest.mark.parametrize("names", OF_GATEWAYS, ids=" ".join)
def test_a_proxy_that_is_no_url_is_named(names: tuple[str, ...], tmp_path: Path) -> None:
    shown = refused(*with_arguments(names, tmp_path), "--url", ELSEWHERE, HTTP_PROXY="::::")

    assert "HTTP_PROXY does not name a proxy" in shown


@pytest.mark.parametrize("names", [("status",), ("chat",), ("doctor",)], ids=" ".join)
@pytest.mark.parametrize(
    ("variable", "value", "error"),
    [
        ("http_proxy", "ftp://proxy", "HTTP_PROXY does not name a proxy"),
        ("ALL_PROXY", "socks5://127.0.0.1:1", "SOCKS proxy"),
        ("HTTP_PROXY", "http://127.0.0.1:1", "Connection refused"),
    ],
)
def test_a_proxy_that_cannot_be_used_is_named(
    names: tuple[str, ...], variable: str, value: str, error: str
) -> None:
    assert error in refused(*names, "--url", ELSEWHERE, **{variable: value})


@pytest.mark.parametrize("names", OF_GATEWAYS, ids=" ".join)
def test_a_key_file_that_is_no_text_is_named(names: tuple[str, ...], tmp_path: Path) -> None:
    path = damaged(tmp_path / "the.key", "bytes")
    line = with_arguments(names, tmp_path)

    assert "the.key" in refused(*line, "--url", ELSEWHERE, "--api-key-file", str(path))


@pytest.mark.parametrize("damage", ["missing", "folder", "empty", "lines"])
def test_a_key_file_that_has_no_key_is_named(damage: str, tmp_path: Path) -> None:
    path = damaged(tmp_path / "the.key", damage)

    assert "the.key" in refused("status", "--api-key-file", str(path))


@pytest.mark.parametrize(
    ("service", "name"),
    [
        (service, name)
        for service, settings in SERVICES.items()
        for name in settings.model_fields
        if name in SECRETS or (name.endswith("_file") and name != "audit_file")
    ],
)
@pytest.mark.parametrize("damage", ["missing", "folder", "bytes", "lines"])
def test_a_damaged_file_of_a_service_is_named(
    service: str, name: str, damage: str, tmp_path: Path
) -> None:
    path = damaged(tmp_path / "the.file", damage)
    line = [service, option(name), f"file:{path}" if name in SECRETS else str(path)]
    line += ["--port", "0"] if service != "worker" else []
    if name != "broker" and service != "serve":
        line += ["--broker", "amqp://nobody@127.0.0.1:1/warren"]
    if service != "gateway":
        line += ["--model", str(tmp_path)]

    shown = refused(*line, WARREN_DATA_DIR=str(tmp_path / "data"))

    named = ("the.file", option(name), f"the URL of the {name.removesuffix('_url')}")
    assert any(name in shown for name in named)


def damaged(path: Path, damage: str) -> Path:
    """What lies at a path where a command expects a small text file."""
    match damage:
        case "folder":
            path.mkdir()
        case "bytes":
            path.write_bytes(bytes(range(128, 256)))
        case "empty":
            path.touch()
        case "lines":
            path.write_text("a b\n\x07\n[")
    return path


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served() as url:
        yield url


@pytest.mark.parametrize(
    "exceptions", ["localhost,fd00::/8", "[::1]", "10.0.0.0/8", "::1,*.x", ","]
)
def test_a_gateway_of_this_machine_is_asked_without_a_proxy(url: str, exceptions: str) -> None:
    ended = warren("status", "--url", url, NO_PROXY=exceptions, HTTP_PROXY="http://127.0.0.1:1")

    assert ended.returncode == 0, ended


def process(*line: str, shell: str = "", typed: bytes = b"", **env: str) -> Ended:
    """What a process leaves that a shell starts with these redirections."""
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {shell}', "sh", sys.executable, "warren.py", *line],
        cwd=ROOT,
        input=typed,
        capture_output=True,
        env={**os.environ, "COLUMNS": "120", "TERM": "dumb", **env},
    )
    return Ended(done.returncode, done.stdout.decode(), done.stderr.decode())


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&- 2>&-"])
def test_a_command_does_its_work_without_standard_streams(
    url: str, closed: str, tmp_path: Path
) -> None:
    results = tmp_path / "results"
    (tmp_path / "input").write_text(REQUEST)

    ended = process("batch", str(tmp_path / "input"), str(results), "--url", url, shell=closed)

    assert (ended.returncode, results.exists()) == (0, True), ended


def test_a_terminal_of_ascii_gets_all_tables_and_answers(url: str) -> None:
    ascii_only: dict[str, Any] = {
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONIOENCODING": "ascii",
    }

    shown = process("status", "--url", url, **ascii_only)
    answered = process("chat", "--url", url, typed="Grüße ∞\n".encode(), **ascii_only)

    assert (shown.returncode, shown.stderr) == (0, "")
    assert (shown.stdout + answered.stdout).isascii()
    assert "----------   0%" in shown.stdout
    assert answered.returncode == 0, answered
    assert r"\xfc\xdfe \u221e" in answered.stdout
