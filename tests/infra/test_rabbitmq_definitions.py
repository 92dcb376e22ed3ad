"""infra/rabbitmq agrees with the code, and contains no secret."""

import base64
import hashlib
import json
import os
import re
import stat
import subprocess
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shared import topology
from shared.bus.base import MAX_MESSAGE_BYTES, Exchange
from tests.support.deployment.broker import INFRA

DEFINITIONS: dict[str, Any] = json.loads((INFRA / "definitions.json").read_text())
EXCHANGES = [value for value in vars(topology).values() if isinstance(value, Exchange)]


PASSWORDS = {
    "GATEWAY_PASSWORD": "pässword",
    "WORKER_PASSWORD": "w",
    "PUBLISHER_PASSWORD": "p",
    "OPERATOR_PASSWORD": "o",
}


def run_script(
    *arguments: str | Path, passwords: Mapping[str, str], directory: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, INFRA / "render_definitions.py", *arguments],
        env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8", **passwords},
        cwd=directory,
        text=True,
        capture_output=True,
    )


def test_the_exchanges_are_those_of_the_topology() -> None:
    defined = {(exchange["name"], exchange["type"]) for exchange in DEFINITIONS["exchanges"]}

    assert defined == {(exchange.name, exchange.kind) for exchange in EXCHANGES}
    assert all(exchange["durable"] for exchange in DEFINITIONS["exchanges"])


def test_workers_give_no_commands() -> None:
    [worker] = [one for one in DEFINITIONS["permissions"] if one["user"] == "worker"]

    assert re.search(worker["write"], topology.USAGE_REPORTS.name)
    assert not re.search(worker["write"], topology.CONTROL.name)


@pytest.mark.parametrize("model", ["m", "org/model.v1", "dead"])
def test_the_policies_bound_all_stored_jobs(model: str) -> None:
    queues = [topology.jobs_queue(model, lane).name for lane in topology.DECLARED_LANES]
    queues.append(topology.resumed_queue(model, "cpu").name)
    queues.append(topology.near_queue(model, f"worker.{uuid.uuid4().hex}").name)

    applied = [policies_of(name) for name in (*queues, topology.DEAD_LETTERS.name)]

    assert all([name] == ["warren-jobs"] for [name] in applied[:-1])
    assert applied[-1] == ["warren-dead-letters"]


def test_the_policies_bound_logs_and_commands() -> None:
    logs = ["reply.chatcmpl-1", "reply.chatcmpl-1--2", "reply.alice.1"]
    logs.append(topology.quick_replies_queue("g").name)
    commands = [
        topology.worker_queue("w"),
        topology.peers_queue("w"),
        topology.group_queue("m", 4, "0f"),
        topology.gateway_queue("g"),
        topology.usage_queue("g"),
        topology.announcements_queue("g"),
    ]

    assert [policies_of(name) for name in logs] == [["warren-logs"]] * len(logs)
    assert [policies_of(queue.name) for queue in commands] == [["warren-commands"]] * len(commands)


def policies_of(queue: str) -> list[str]:
    return [one["name"] for one in DEFINITIONS["policies"] if re.search(one["pattern"], queue)]


def test_the_broker_takes_the_largest_message_that_the_bus_sends() -> None:
    settings = dict(
        line.split(" = ")
        for line in (INFRA / "rabbitmq.conf").read_text().splitlines()
        if " = " in line
    )

    assert int(settings["max_message_size"]) == MAX_MESSAGE_BYTES


def test_no_password_is_shipped() -> None:
    assert {user["password_hash"] for user in DEFINITIONS["users"]} == {""}


def test_a_rendered_hash_is_that_of_the_password(tmp_path: Path) -> None:
    run_script(tmp_path / "definitions.json", passwords=PASSWORDS)

    assert_has_passwords(tmp_path / "definitions.json")


def test_passwords_can_be_read_from_files(tmp_path: Path) -> None:
    files = {}
    for variable, password in PASSWORDS.items():
        (tmp_path / variable).write_text(f"{password}\n", encoding="utf-8")
        files[f"{variable}_FILE"] = str(tmp_path / variable)

    run_script(tmp_path / "definitions.json", passwords=files)

    assert_has_passwords(tmp_path / "definitions.json")


def assert_has_passwords(definitions: Path) -> None:
    users = {user["name"]: user for user in json.loads(definitions.read_text())["users"]}
    for name in users:
        salted = base64.b64decode(users[name]["password_hash"])
        password = PASSWORDS[f"{name.upper()}_PASSWORD"]
        assert salted[4:] == hashlib.sha256(salted[:4] + password.encode()).digest()


@pytest.mark.parametrize(
    ("passwords", "reason"),
    [
        ({"WORKER_PASSWORD_FILE": "no such file"}, "No such file"),
        ({**PASSWORDS, "WORKER_PASSWORD_FILE": "f"}, "WORKER_PASSWORD_FILE are both set"),
    ],
)
def test_a_password_that_cannot_be_read_is_named(
    passwords: Mapping[str, str], reason: str, tmp_path: Path
) -> None:
    refused = run_script("definitions.json", passwords=passwords, directory=tmp_path)

    assert (refused.returncode, reason in refused.stderr) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_missing_passwords_are_all_named_and_nothing_is_written(tmp_path: Path) -> None:
    passwords = {"GATEWAY_PASSWORD": "x", "WORKER_PASSWORD": "y", "PUBLISHER_PASSWORD": ""}

    refused = run_script("definitions.json", passwords=passwords, directory=tmp_path)

    assert refused.returncode == 2
    assert "set PUBLISHER_PASSWORD, OPERATOR_PASSWORD\n" in refused.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("arguments", "status"), [([], 2), (["--help"], 0), (["no/such/file"], 2)])
def test_a_call_without_a_usable_output_writes_nothing(
    arguments: list[str], status: int, tmp_path: Path
) -> None:
    shown = run_script(*arguments, passwords=PASSWORDS, directory=tmp_path)

    assert shown.returncode == status
    assert "usage: render_definitions.py" in shown.stdout + shown.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("options", "mode"), [([], 0o600), (["--mode=644"], 0o644)])
def test_only_the_owner_reads_the_file_unless_others_are_allowed_to(
    options: list[str], mode: int, tmp_path: Path
) -> None:
    output = tmp_path / "definitions.json"
    output.touch(mode=0o666)

    run_script(*options, output, passwords=PASSWORDS)

    assert stat.S_IMODE(output.stat().st_mode) == mode


@pytest.mark.parametrize("name", ["gateway", "worker", "publisher"])
def test_only_operators_have_a_tag(name: str) -> None:
    [user] = [user for user in DEFINITIONS["users"] if user["name"] == name]

    assert user["tags"] == []
