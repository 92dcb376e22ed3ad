"""infra/rabbitmq agrees with the code, and contains no secret."""

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shared import topology
from shared.bus.base import MAX_MESSAGE_BYTES, Exchange
from tests.support.deployment.broker import INFRA

DEFINITIONS: dict[str, Any] = json.loads((INFRA / "definitions.json").read_text())
EXCHANGES = [value for value in vars(topology).values() if isinstance(value, Exchange)]


def render(output: Path, **passwords: str) -> dict[str, dict[str, Any]]:
    """Run the script; returns the users by name."""
    subprocess.run(
        [sys.executable, INFRA / "render_definitions.py", output],
        env={"PATH": os.environ["PATH"], **passwords},
        check=True,
    )
    return {user["name"]: user for user in json.loads(output.read_text())["users"]}


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
    queues = [topology.jobs_queue(model, lane).name for lane in topology.LANES]
    queues.append(topology.resumed_queue(model, "cpu").name)

    applied = [policies_of(name) for name in (*queues, topology.DEAD_LETTERS.name)]

    assert all([name] == ["warren-jobs"] for [name] in applied[:-1])
    assert applied[-1] == ["warren-dead-letters"]


def test_the_policies_bound_logs_and_commands() -> None:
    logs = ["reply.chatcmpl-1", "reply.chatcmpl-1--2", "reply.alice.1"]
    logs.append(topology.quick_replies_queue("g").name)
    commands = [
        topology.worker_queue("w"),
        topology.peers_queue("w"),
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
    users = render(tmp_path / "definitions.json", GATEWAY_PASSWORD="pässword")

    salted = base64.b64decode(users["gateway"]["password_hash"])
    assert salted[4:] == hashlib.sha256(salted[:4] + "pässword".encode()).digest()


def test_a_user_without_a_password_cannot_log_in(tmp_path: Path) -> None:
    users = render(tmp_path / "definitions.json", GATEWAY_PASSWORD="x")

    assert users["gateway"]["password_hash"] != ""
    assert {users[name]["password_hash"] for name in ("worker", "publisher", "operator")} == {""}


@pytest.mark.parametrize("name", ["gateway", "worker", "publisher"])
def test_only_operators_have_a_tag(name: str) -> None:
    [user] = [user for user in DEFINITIONS["users"] if user["name"] == name]

    assert user["tags"] == []
