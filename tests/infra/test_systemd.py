"""The units of systemd, as far as they can be checked without an init system."""

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import typer

from cli import main
from gateway.app import MAX_CLOSING_S
from shared.settings import GatewaySettings

UNITS = sorted((Path(__file__).parents[2] / "infra" / "systemd").iterdir())

per_unit = pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)


def value(unit: Path, name: str) -> str:
    (found,) = [
        line.partition("=")[2]
        for line in unit.read_text().splitlines()
        if line.startswith(f"{name}=")
    ]
    return found


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@per_unit
def test_systemd_accepts_it(unit: Path, tmp_path: Path) -> None:
    instance = tmp_path / unit.name.replace("@.", "@8001.")
    instance.write_text(unit.read_text().replace("/opt/warren/bin/warren", "/bin/true"))

    verified = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", instance], text=True, capture_output=True
    )

    assert (verified.returncode, verified.stderr) == (0, "")


@per_unit
def test_its_command_and_options_exist(unit: Path) -> None:
    program, name, *arguments = shlex.split(value(unit, "ExecStart"))
    command = typer.main.get_command(main.app).commands[name]  # type: ignore[attr-defined]

    options = {option for parameter in command.params for option in parameter.opts}

    assert program == "/opt/warren/bin/warren"
    assert {argument for argument in arguments if argument.startswith("--")} <= options


@pytest.mark.parametrize(
    ("name", "beyond_s"), [("warren-gateway", MAX_CLOSING_S), ("warren-worker@", 25)]
)
def test_it_is_killed_only_after_its_drain(name: str, beyond_s: int) -> None:
    (unit,) = [unit for unit in UNITS if unit.stem == name]

    assert int(value(unit, "TimeoutStopSec")) >= GatewaySettings().drain_grace_s + beyond_s
    assert value(unit, "KillMode") == "mixed"


@per_unit
def test_it_runs_without_privileges_and_gets_secrets_as_credentials(unit: Path) -> None:
    text = unit.read_text()

    assert value(unit, "NoNewPrivileges") == "true"
    assert value(unit, "CapabilityBoundingSet") == ""
    assert value(unit, "ProtectSystem") == "strict"
    assert "LoadCredential=broker:" in text
    assert "PASSWORD" not in text


def test_gateway_and_workers_are_different_users() -> None:
    """A worker reads models of strangers: it must not reach the gateway's secret and prompts."""
    users = {unit.stem: value(unit, "User") for unit in UNITS}

    assert users == {"warren-gateway": "warren-gateway", "warren-worker@": "warren-worker"}


@per_unit
def test_a_crash_writes_no_prompts_to_the_disk(unit: Path) -> None:
    assert value(unit, "LimitCORE") == "0"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@per_unit
def test_systemd_finds_it_well_confined(unit: Path, tmp_path: Path) -> None:
    instance = tmp_path / unit.name.replace("@.", "@8001.")
    instance.write_text(unit.read_text().replace("/opt/warren/bin/warren", "/bin/true"))
    options = ("--offline=true", "--threshold=20", "--no-pager")  # tenths; 100 is unconfined

    rated = subprocess.run(
        ["systemd-analyze", "security", *options, instance], text=True, capture_output=True
    )

    assert rated.returncode == 0, rated.stdout


def test_a_worker_writes_to_its_cache_directory_alone() -> None:
    (unit,) = [unit for unit in UNITS if unit.stem == "warren-worker@"]
    caches = dict(one.split("=") for one in value(unit, "Environment").split())

    assert value(unit, "CacheDirectory") == "warren"
    assert caches == {
        "XDG_CACHE_HOME": "%C",  # in which Warren's own is warren/
        "HF_HOME": "%C/warren/huggingface",
        "TRITON_CACHE_DIR": "%C/warren/triton",
    }
