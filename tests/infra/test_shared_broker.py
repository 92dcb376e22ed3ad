"""Warren at a broker that serves others, too: what is theirs stays as it is."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from yarl import URL

from cli.doctor.broker import check_broker
from cli.doctor.findings import Finding
from infra.rabbitmq.render_definitions import password_hash, shared
from shared.bus.rabbit import RabbitBus
from tests.support.deployment.broker import INFRA, ROOT_VARIABLE, RabbitNode, new_node
from tests.support.gateway.http import live_gateway
from tests.support.workers.synthetic import echo_worker

VHOST = "llm"
TRUSTED = "llm-gateway,llm-worker,llm-operator"
ROLES = ("gateway", "worker", "publisher", "operator")
OTHERS: dict[str, Any] = {
    "vhosts": [{"name": "/"}, {"name": "shop"}, {"name": "warren"}],
    "users": [
        {
            "name": name,
            "password_hash": password_hash("theirs"),
            "hashing_algorithm": "rabbit_password_hashing_sha256",
            "tags": tags,
        }
        for name, tags in (("gateway", []), ("operator", ["administrator"]))
    ],
    "permissions": [
        {"user": "gateway", "vhost": "shop", "configure": "^$", "write": ".*", "read": "orders"},
        {"user": "operator", "vhost": "warren", "configure": ".*", "write": ".*", "read": ".*"},
    ],
    "policies": [
        {
            "name": "warren-jobs",
            "vhost": "shop",
            "pattern": ".*",
            "apply-to": "queues",
            "priority": 0,
            "definition": {"max-length": 7},
        }
    ],
    "queues": [
        {"name": "orders", "vhost": "shop", "durable": True, "auto_delete": False, "arguments": {}}
    ],
}
"""Of another project, which uses the names of Warren's users and policies in its own way."""
EXPORT = 'io:format("~ts~n", [rabbit_json:encode(rabbit_definitions:all_definitions())])'
"""What `rabbitmqctl export_definitions` exports, as a line of JSON."""


@pytest.fixture(scope="module")
def node() -> Iterator[RabbitNode]:
    with new_node(json.dumps(OTHERS)) as node:
        node.start()
        yield node


@pytest.fixture(scope="module")
def added(node: RabbitNode, tmp_path_factory: pytest.TempPathFactory) -> RabbitNode:
    """The node with Warren's virtual host."""
    add(node, VHOST, tmp_path_factory.mktemp("added") / "definitions.json")
    return node


def add(node: RabbitNode, vhost: str, rendered: Path) -> None:
    options = [] if ROOT_VARIABLE in os.environ else ["--before-3.12"]
    assert render(rendered, *options, vhost=vhost).returncode == 0
    node.ctl("import_definitions", str(rendered))


def render(output: Path, *options: str, vhost: str = VHOST) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, INFRA / "render_definitions.py", "--shared", vhost, *options, output],
        env={"PATH": os.environ["PATH"], **{f"{role.upper()}_PASSWORD": role for role in ROLES}},
        text=True,
        capture_output=True,
        check=False,
    )


def evaluated(node: RabbitNode, *expressions: str) -> list[dict[str, Any]]:
    """What expressions of Erlang print, each a line of JSON."""
    printed = node.evaluate(", ".join(expressions))
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def outside(definitions: dict[str, Any], vhost: str) -> dict[str, Any]:
    """What belongs neither to a virtual host nor to the users that are named after it."""
    own = {vhost, *(f"{vhost}-{role}" for role in ROLES)}
    return {
        kind: sorted((one for one in value if not is_of(own, kind, one)), key=json.dumps)
        if isinstance(value, list)
        else value
        for kind, value in definitions.items()
    }


def is_of(own: set[str], kind: str, entry: dict[str, Any]) -> bool:
    return (entry["name"] if kind in {"users", "vhosts"} else entry.get("vhost")) in own


def url_of(node: RabbitNode, role: str) -> str:
    url = URL(node.url).with_user(f"{VHOST}-{role}").with_password(role)
    return str(url.with_path(f"/{VHOST}"))


@pytest.mark.rabbit
@pytest.mark.breaks_broker
def test_nothing_of_others_changes(node: RabbitNode, tmp_path: Path) -> None:
    vhost = "passing"
    (before,) = evaluated(node, EXPORT)
    add(node, vhost, tmp_path / "definitions.json")
    delete = f'rabbit_vhost:delete(<<"{vhost}">>, <<"tests">>)'
    beside, after = evaluated(node, EXPORT, delete, EXPORT)

    assert {"orders"} <= {one["name"] for one in before["queues"]}
    assert {one["name"] for one in beside["vhosts"]} >= {"/", "shop", "warren", vhost}
    assert outside(beside, vhost) == outside(before, vhost) == outside(after, vhost)
    assert not any(one.get("vhost") == vhost for one in [*after["policies"], *after["permissions"]])


@pytest.mark.rabbit
@pytest.mark.breaks_broker
@pytest.mark.parametrize("role", ["gateway", "worker", "publisher"])
async def test_the_accounts_have_their_permissions(role: str, added: RabbitNode) -> None:
    findings = await check_broker(url_of(added, role), "llama")

    assert permissions_in(findings) == [
        ("ok", f"user '{VHOST}-{role}' has the permissions of a {role}")
    ]


def permissions_in(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(one.status, one.detail) for one in findings if one.check == "permissions"]


@pytest.mark.rabbit
@pytest.mark.breaks_broker
async def test_a_gateway_and_a_worker_answer_there(added: RabbitNode) -> None:
    async with (
        RabbitBus(url_of(added, "gateway"), name="gateway") as at_gateway,
        RabbitBus(url_of(added, "worker"), name="worker") as at_worker,
        echo_worker(at_worker, trusted_users=TRUSTED),
        live_gateway(at_gateway, trusted_users=TRUSTED) as gateway,
    ):
        answer = await gateway.openai.chat.completions.create(
            model="echo", messages=[{"role": "user", "content": "one two"}], max_tokens=4
        )

    assert answer.choices[0].finish_reason is not None


def test_no_user_of_a_shared_broker_is_an_administrator() -> None:
    users = shared(VHOST, has_timeouts=True)["users"]

    assert [(one["name"], one["tags"]) for one in users if one["tags"]] == [
        (f"{VHOST}-operator", ["management"])
    ]


def test_an_option_of_shared_brokers_alone_is_refused_without_one(tmp_path: Path) -> None:
    refused = subprocess.run(
        [sys.executable, INFRA / "render_definitions.py", "--before-3.12", tmp_path / "d.json"],
        text=True,
        capture_output=True,
        check=False,
    )

    assert (refused.returncode, "needs --shared" in refused.stderr) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_jobs_may_take_a_day_where_policies_can_say_so() -> None:
    policies = shared(VHOST, has_timeouts=True)["policies"]

    timeouts = {one["name"]: one["definition"].get("consumer-timeout") for one in policies}
    assert {name: one for name, one in timeouts.items() if one} == {"warren-jobs": 86_400_000}
    old = shared(VHOST, has_timeouts=False)["policies"]
    assert not any("consumer-timeout" in one["definition"] for one in old)


@pytest.mark.parametrize("vhost", ["/", "a/b", "a.b", ""])
def test_a_virtual_host_after_which_no_user_can_be_named_is_refused(
    vhost: str, tmp_path: Path
) -> None:
    refused = render(tmp_path / "definitions.json", vhost=vhost)

    assert (refused.returncode, "is not letters" in refused.stderr) == (2, True)
    assert list(tmp_path.iterdir()) == []
