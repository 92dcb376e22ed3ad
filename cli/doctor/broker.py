"""The checks of ``warren doctor`` that concern the broker.

The permissions of an account are tried out on queues that the checks declare and delete, and on
routing keys to which no queue is bound, so a running deployment is not disturbed.
"""

import asyncio
import json
import re
import secrets
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from yarl import URL

from cli.doctor.findings import Finding, failure, ok, skipped, warning
from cli.doctor.web import fetch
from shared import topology
from shared.bus.base import Binding, Message, Queue
from shared.bus.rabbit import RabbitBus
from shared.bus.rabbit.addresses import parse_urls
from shared.bus.rabbit.link import DEFAULT_USER
from shared.errors import AccessRefused, BusError, BusUnavailable, StartupError, Unroutable
from shared.topology import own_name
from worker.process.prepared_queues import declare_or_find

_DEFINITIONS = (
    "import the definitions with passwords: run infra/rabbitmq/render_definitions.py FILE, then "
    "rabbitmqctl import_definitions FILE (docs/deployment/rabbitmq.md, Passwords)"
)
_OLDEST, _NEWEST = (3, 10), (4, 3)
"""The versions of RabbitMQ that Warren is tested with."""
_POLICIES = {
    "warren-jobs",
    "warren-ledger",
    "warren-dead-letters",
    "warren-logs",
    "warren-commands",
}
_TIMEOUT_S = 5.0

Attempt = Callable[[RabbitBus], Awaitable[None]]


async def check_broker(url: str, model: str) -> list[Finding]:
    """Check that the broker can be reached, its version, the account's permissions and the queues
    of ``model``."""
    try:
        addresses = parse_urls(url)
    except StartupError as error:
        return [failure("broker", str(error), "correct the URL")]
    place = ", ".join(f"{address.host}:{address.port}" for address in addresses)
    problems = await asyncio.gather(*(asyncio.to_thread(_unreachable, one) for one in addresses))
    down = [
        f"{address.host}:{address.port} cannot be reached: {problem}"
        for address, problem in zip(addresses, problems, strict=True)
        if problem is not None
    ]
    if len(down) == len(addresses):
        remedy = "start RabbitMQ, or correct host and port of --broker"
        return [failure("broker", "; ".join(down), remedy)]
    address = addresses[0]
    try:
        async with RabbitBus(url, name="warren doctor") as bus:
            if not bus.is_connected:
                return [
                    failure(
                        "broker",
                        f"{place} answers, but not as an AMQP 0-9-1 broker over {address.scheme}",
                        "check the port, and amqp:// or amqps:// at the URL's beginning",
                    )
                ]
            return [
                *(warning("broker", node, "start this node") for node in down),
                *_versions(bus, place),
                await _permissions(bus, address.user or DEFAULT_USER),
                await _queues(bus, model),
            ]
    except StartupError as error:
        return [failure("broker", str(error), "correct --broker, or the account at the broker")]


def virtual_host(url: str) -> str:
    """The virtual host of a broker's URL; ``/`` if the URL cannot be read."""
    try:
        return parse_urls(url)[0].path[1:] or "/"
    except StartupError:
        return "/"


def check_management(url: str, vhost: str) -> list[Finding]:
    """Check policies, alarms and nodes through RabbitMQ's management API at ``url``."""
    try:
        policies = _listed(url, f"/api/policies/{quote(vhost, safe='')}")
        nodes = _listed(url, "/api/nodes")
    except (OSError, ValueError) as error:
        return [
            failure(
                "management",
                f"the management API cannot be queried: {error}",
                "enable rabbitmq_management, and name a user with the tag monitoring in the URL",
            )
        ]
    missing = _POLICIES - {policy["name"] for policy in policies}
    alarms = [
        f"{node['name']}: {name}"
        for node in nodes
        for name in ("mem_alarm", "disk_free_alarm")
        if node.get(name)
    ]
    stopped = [node["name"] for node in nodes if not node.get("running", True)]
    findings = [
        warning("policies", f"missing: {', '.join(sorted(missing))}", _DEFINITIONS)
        if missing
        else ok("policies", "all queues are limited")
    ]
    if alarms:
        findings.append(
            failure(
                "alarms",
                f"publishers are blocked: {', '.join(alarms)}",
                "free memory or disk on the broker",
            )
        )
    if stopped:
        findings.append(failure("nodes", f"not running: {', '.join(stopped)}", "start them again"))
    else:
        findings.append(ok("nodes", f"{len(nodes)} running"))
    return findings


def _listed(url: str, path: str) -> list[dict[str, Any]]:
    """A list of the management API. Raises `OSError` and `ValueError`."""
    answer = fetch(url.rstrip("/") + path)
    if answer.status != HTTPStatus.OK:
        raise ValueError(f"{path} is answered {answer.status}")
    found: list[dict[str, Any]] = json.loads(answer.body)
    return found


def _unreachable(address: URL) -> str | None:
    try:
        with socket.create_connection((address.host or "", address.port or 0), _TIMEOUT_S):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _versions(bus: RabbitBus, place: str) -> list[Finding]:
    product, version = bus.server.get("product", "unknown"), bus.server.get("version", "")
    detail = f"{product} {version} at {place}"
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and _OLDEST <= (int(numbers[1]), int(numbers[2])) <= _NEWEST:
        return [ok("broker", detail)]
    return [
        warning("broker", detail, "Warren is tested with RabbitMQ 3.10 to 4.3: use one of these")
    ]


async def _permissions(bus: RabbitBus, user: str) -> Finding:
    """Try what the account's side does."""
    side = await _side(bus, user)
    refused, missing = [], False
    for what, attempt in _ATTEMPTS[side](user).items():
        try:
            await attempt(bus)
        except Unroutable as error:
            missing = missing or "no exchange" in str(error)
        except AccessRefused:
            refused.append(what)
        except BusError as error:
            refused.append(f"{what} ({error.message})")
    if missing:
        return failure("permissions", "the exchanges of Warren do not exist", _DEFINITIONS)
    if refused:
        return failure(
            "permissions", f"user {user!r} may not {'; not '.join(refused)}", _DEFINITIONS
        )
    return ok("permissions", f"user {user!r} has the permissions of a {side}")


async def _side(bus: RabbitBus, user: str) -> str:
    """The side of an account: its name if the account is shipped, else the side whose own queue it
    may declare."""
    if user in _ATTEMPTS:
        return user
    one = f"doctor-{secrets.token_hex(8)}"
    own = {"gateway": topology.gateway_queue(one), "worker": topology.worker_queue(one)}
    for side, queue in own.items():
        with suppress(BusError):
            await _declares(queue)(bus)
            return side
    return "publisher"


def _gateway_attempts(_: str) -> dict[str, Attempt]:
    one = f"doctor-{secrets.token_hex(8)}"
    return {
        "publish jobs": _publishes(topology.jobs_binding("doctor", "interactive")),
        "keep logs": _keeps_a_log(one),
        "command workers": _publishes(topology.worker_binding("worker.doctor")),
        "hear workers": _declares(topology.announcements_queue(one)),
        "hear gateways": _declares(topology.gateway_queue(one)),
        "read usage records": _keeps_records,
    }


def _worker_attempts(_: str) -> dict[str, Attempt]:
    one = f"doctor-{secrets.token_hex(8)}"
    return {
        "return jobs": _publishes(topology.jobs_binding("doctor", "interactive")),
        "quarantine jobs": _publishes(topology.jobs_binding("doctor", "suspect")),
        "record usage": _finds_records,
        "answer": _publishes(topology.reply_binding(topology.reply_key(one))),
        "receive commands": _declares(topology.worker_queue(one)),
        "hear its peers": _declares(topology.peers_queue(one)),
    }


def _publisher_attempts(user: str) -> dict[str, Attempt]:
    one = own_name(user, f"doctor-{secrets.token_hex(8)}")
    return {
        "publish jobs": _publishes(topology.jobs_binding("doctor", "interactive")),
        "command workers": _publishes(topology.worker_binding("worker.doctor")),
        "declare reply queues": _declares(topology.reply_queue(one, expires_s=_TIMEOUT_S)),
        "hear workers": _declares(topology.publisher_queue(one)),
    }


_ATTEMPTS: dict[str, Callable[[str], dict[str, Attempt]]] = {
    "gateway": _gateway_attempts,
    "worker": _worker_attempts,
    "publisher": _publisher_attempts,
}


def _publishes(binding: Binding) -> Attempt:
    """Publish to an exchange without queues: the broker returns the message if it is permitted."""

    async def attempt(bus: RabbitBus) -> None:
        await bus.publish(binding, Message(b""))

    return attempt


def _declares(queue: Queue) -> Attempt:
    async def attempt(bus: RabbitBus) -> None:
        await bus.declare(queue)
        await bus.delete_queue(queue.name)

    return attempt


async def _keeps_records(bus: RabbitBus) -> None:
    """Declare the queue of usage records, which a deployment has anyway."""
    await bus.declare(topology.LEDGER_RECORDS)


async def _finds_records(bus: RabbitBus) -> None:
    """Declare the queue of usage records, or find it: a limited worker may not declare it."""
    await declare_or_find(topology.LEDGER_RECORDS, bus.declare, bus.inspect)


def _keeps_a_log(name: str) -> Attempt:
    """Declare, write, read and delete a reply queue."""
    queue = topology.reply_queue(name, expires_s=_TIMEOUT_S)

    async def attempt(bus: RabbitBus) -> None:
        await bus.declare(queue)
        try:
            await bus.publish(queue.bindings[0], Message(b"doctor"))
            with suppress(TimeoutError):
                async with asyncio.timeout(_TIMEOUT_S), bus.consume(queue.name) as consumer:
                    async for _ in consumer:
                        return
            raise BusUnavailable(f"a message was not delivered within {_TIMEOUT_S:g} s")
        finally:
            await bus.delete_queue(queue.name)

    return attempt


async def _queues(bus: RabbitBus, model: str) -> Finding:
    """Jobs that wait, and workers that take them."""
    name = topology.jobs_queue(model, "interactive").name
    try:
        state = await bus.inspect(name)
    except BusError as error:
        return skipped("queue", f"{name} cannot be inspected: {error.message}")
    if state is None:
        return warning(
            "queue", f"there is no {name}", f"start a worker of {model}, which declares it"
        )
    detail = f"{name}: {state.num_ready} jobs wait, {state.num_consumers} workers take them"
    if state.num_consumers == 0:
        return warning("queue", detail, f"start a worker of {model}")
    return ok("queue", detail)
