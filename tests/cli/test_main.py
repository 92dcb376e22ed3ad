"""The command line: its output, its errors, and what it does not import."""

import json
import os
import re
import socket
import subprocess
import sys
from importlib import metadata
from itertools import chain
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.main import app
from shared.settings import CommonSettings, GatewaySettings, WorkerSettings, option
from tests.support.deployment.command import warren
from tests.support.gateway.serving import served

ROOT = Path(__file__).parents[2]
BROKER = "--broker=amqp://nobody:secret@127.0.0.1:1/warren"
COMMANDS = ["serve", "gateway", "worker", "pull", "chat", "batch", "status", "top"]
COMMANDS += ["drain", "doctor", "size", "verify", "replay"]
GROUPS = {
    "batches": ["list"],
    "dead": ["list"],
    "keys": ["add", "list", "rotate", "revoke"],
    "models": ["list", "remove"],
    "sessions": ["end"],
    "streams": ["list", "cancel"],
    "tenants": ["erase"],
    "usage": ["erase"],
    "webhooks": ["list", "add"],
}


def process(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """What a process leaves that really runs the command."""
    return subprocess.run(
        [sys.executable, "warren.py", *args],
        cwd=ROOT,
        text=True,
        capture_output=True,
        env={**os.environ, "COLUMNS": "120", "TERM": "dumb", **env},
    )


def test_help_lists_the_commands() -> None:
    shown = process("--help")

    assert shown.returncode == 0
    assert re.findall(r"^  (\w+) +[A-Z]", shown.stdout, re.MULTILINE) == [*COMMANDS, *GROUPS]


@pytest.mark.parametrize(
    ("command", "settings"),
    [
        ("gateway", [GatewaySettings]),
        ("worker", [WorkerSettings]),
        ("serve", [GatewaySettings, WorkerSettings]),
    ],
)
def test_help_shows_each_option_whole_in_80_columns(
    command: str, settings: list[type[CommonSettings]]
) -> None:
    shown = warren(command, "--help", COLUMNS="80").stdout

    listed = re.findall(r"^  (--[a-z-]+)(?: | /|$)", shown, re.MULTILINE)
    assert {option(name) for side in settings for name in side.model_fields} <= {*listed}
    assert max(map(len, shown.splitlines())) <= 80


def test_an_error_does_not_control_the_terminal() -> None:
    shown = warren("usage", "--since", "[red]\x1b[2J")

    assert shown.returncode == 2
    assert r"--since: [red]\x1b[2J is not a date" in shown.stderr


def test_json_is_never_coloured() -> None:
    with served() as url:
        commands = {"status": f"--url={url}", "doctor": f"--url={url}", "size": "--streams=9"}
        for command, argument in commands.items():
            shown = process(command, argument, "--json", FORCE_COLOR="1", TERM="xterm")
            assert json.loads(shown.stdout)


def test_help_wraps_texts_at_the_width_of_the_terminal_and_examples_nowhere() -> None:
    drain = warren("drain", "--help", COLUMNS="110").stdout
    webhooks = warren("webhooks", "add", "--help", COLUMNS="60").stdout

    assert max(map(len, drain.splitlines())) in range(90, 111)
    assert "  warren webhooks add https://example.com/hook --tenant acme --event " in webhooks


@pytest.mark.parametrize(
    "command", [*COMMANDS, *(f"{group} {name}" for group in GROUPS for name in GROUPS[group])]
)
def test_each_commands_help_has_an_example(command: str) -> None:
    runner = CliRunner(env={"COLUMNS": "120", "TERM": "dumb"})

    shown = runner.invoke(app, [*command.split(), "--help"])

    assert shown.exit_code == 0
    assert re.search(rf"^  warren {command} \S", shown.stdout, re.MULTILINE)


def test_the_version_is_that_of_the_installation() -> None:
    shown = process("--version")

    assert (shown.returncode, shown.stdout) == (0, f"warren {metadata.version('warren')}\n")


def test_sources_that_are_not_installed_have_no_version(tmp_path: Path) -> None:
    folders = [Path(folder) for folder in sys.path if folder.endswith("site-packages")]
    for package in chain.from_iterable(folder.iterdir() for folder in folders):
        if "warren" not in package.name and not (tmp_path / package.name).is_symlink():
            (tmp_path / package.name).symlink_to(package)

    shown = subprocess.run(
        [sys.executable, "-S", "warren.py", "--version"],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )

    assert shown.stdout == "warren of unknown version: run from its sources, and not installed\n"


@pytest.mark.parametrize("command", ["serve", "worker"])
def test_a_second_model_is_not_ignored(command: str) -> None:
    shown = warren(command, "--model", "smollm2", "--model=qwen3-0.6b")

    assert shown.returncode == 2
    assert "--model is given 2 times: a process serves one model" in shown.stderr


@pytest.mark.parametrize("option", ["--lora", "--enable-lora", "--tensor-parallel-size"])
def test_what_only_other_servers_can_do_is_not_taken_for_a_misspelling(option: str) -> None:
    variable = f"WARREN{option[1:].replace('-', '_').upper()}"

    for shown in (warren("worker", option, "x"), warren("worker", **{variable: "x"})):
        assert shown.returncode == 2
        assert shown.stderr.endswith("not available; see docs/migrating.md\n")


def test_the_gateway_and_its_key_can_be_variables(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("wk-1-x")
    with served() as url:
        access = {"WARREN_URL": url, "WARREN_API_KEY_FILE": str(tmp_path / "key")}

        shown = warren("status", **access)

    assert shown.returncode == 0, shown


def test_help_shows_the_main_options_first() -> None:
    shown = warren("serve", "--help").stdout

    options = re.findall(r"^  (--[a-z-]+)", shown, re.MULTILINE)
    assert options[:6] == ["--ask", "--once", "--model", "--host", "--port", "--broker"]


def test_help_loads_neither_side() -> None:
    code = "import sys, warren; print({'torch', 'fastapi', 'aio_pika', 'httpx'} & set(sys.modules))"

    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=True
    )

    assert shown.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["gateway"], "no broker"),
        (["worker"], "no broker"),
        (["batch", "in.jsonl", "out.jsonl"], "no broker"),
        (["worker", "--broker=http://x"], "amqp"),
        (["gateway", BROKER, "--port=many"], "--port"),
        (["worker", BROKER, "--kernels=fast"], "--kernels"),
        (["serve", "--once"], "--once needs --ask"),
        (["serve", "--model=no-such-model"], "unknown model no-such-model"),
        (["serve", "--model=./no/such/directory"], "no directory"),
        (["pull", "no-such-model"], "unknown model no-such-model"),
        (["serve", "--model=smolm2"], "did you mean smollm2?"),
        (["chat", "--url=http://127.0.0.1:1"], "no server answers"),
        (["gateway", "--broker=amqp://gateway:p/ss@localhost/warren"], "/ as %2F"),
        (["gateway", "--max-request=8"], "did you mean --max-"),
        (
            ["gateway", "--device=cpu"],
            "error: --device is an option of warren worker and warren serve",
        ),
        (["dead", "list", "--log-level=info"], "warren gateway, warren worker and warren serve"),
        (["chat", "--no-store-responses"], "is an option of warren gateway and warren serve"),
        (["gateway", "--ping-interval-s=5"], "--ping-interval-s was removed: it is always 15"),
        (["gatewy"], "did you mean 'gateway'?"),
        (["gateway", "--allow-anonymous=true"], "'--allow-anonymous' does not take a value"),
        (["gateway", "--broker=file:/no/such/file"], "--broker: /no/such/file cannot be read"),
        (["gateway", "--broker-file=url"], "--broker-file was removed: set broker=file:PATH"),
    ],
)
def test_what_cannot_work_stops_the_start_with_one_line(args: list[str], reason: str) -> None:
    stopped = warren(*args)

    assert stopped.returncode == 2
    assert reason in stopped.stderr
    assert len(stopped.stderr.splitlines()) == 1


def test_an_unknown_variable_stops_the_start_with_one_line() -> None:
    stopped = process("gateway", BROKER, WARREN_MAX_REQUEST="8")

    assert stopped.returncode == 2
    assert stopped.stderr == (
        "error: unknown setting WARREN_MAX_REQUEST: did you mean WARREN_MAX_REQUESTS?\n"
    )


def test_a_taken_port_stops_the_start_with_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        stopped = process("gateway", BROKER, f"--port={port}")

    assert stopped.returncode == 2
    assert stopped.stderr == (
        f"error: cannot listen on 127.0.0.1:{port}: Address already in use; choose another address "
        "with --host and --port\n"
    )


def test_a_taken_health_port_is_found_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        stopped = process("serve", "--port=0", f"--health-port={port}", "--device=no-such-device")

    assert stopped.returncode == 2
    assert stopped.stderr.splitlines()[-1] == (
        f"error: cannot listen on health port 127.0.0.1:{port}: Address already in use; choose "
        "another one with --health-port"
    )


def test_the_known_models_are_listed_with_how_they_run() -> None:
    listed = warren("pull", "--list")

    assert listed.returncode == 0
    rows = [line.split()[:5] for line in listed.stdout.splitlines()]
    assert ["qwen3-0.6b", "0.6B", "Apache-2.0", "natively", "Qwen/Qwen3-0.6B"] in rows
    assert ["phi2", "2.7B", "MIT", "transformers", "microsoft/phi-2"] in rows


def test_a_brokers_password_is_never_shown() -> None:
    stopped = warren("gateway", BROKER, "--port=many")

    assert "secret" not in stopped.stderr + stopped.stdout
