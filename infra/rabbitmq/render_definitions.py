"""Write the broker's definitions with the deployment's passwords, before the broker starts.

Usage: python render_definitions.py OUTPUT, with GATEWAY_PASSWORD, WORKER_PASSWORD,
PUBLISHER_PASSWORD and OPERATOR_PASSWORD in the environment. Each can be read from a file instead,
which GATEWAY_PASSWORD_FILE and so on name. Nothing is written unless every user of
definitions.json has a password. Only the owner can read the file, so give it to the broker's user.

With ``--shared VHOST`` the definitions are for a broker that also serves others: see
docs/deployment/shared-broker.md.
"""

import argparse
import base64
import hashlib
import json
import os
import re
import secrets
from pathlib import Path
from typing import Any

TEMPLATE = Path(__file__).with_name("definitions.json")
_SALT_BYTES = 4
_NAME = re.compile(r"[A-Za-z0-9_-]+")
"""Of a virtual host and so of its users, whose names are in request ids."""
_JOBS = "warren-jobs"
"""The policy of queues whose messages stay unacknowledged for as long as an answer takes. Logs have
no ``consumer-timeout``: classic queues lose it with RabbitMQ 4.3, and the broker applies no policy
to a queue whose type does not know all of its keys."""
_ANSWER_MS = 86_400_000
"""As long as ``consumer_timeout`` in rabbitmq.conf."""


def password_hash(password: str) -> str:
    """RabbitMQ's salted SHA-256, as its page "Credentials and Passwords" defines it."""
    salt = secrets.token_bytes(_SALT_BYTES)
    return base64.b64encode(salt + hashlib.sha256(salt + password.encode()).digest()).decode()


def shared(vhost: str, *, has_timeouts: bool) -> dict[str, Any]:
    """The definitions for a broker that also serves others: everything is in ``vhost``, and the
    users, which belong to the whole broker, are named after it and administer nothing.

    The policy of jobs replaces the ``consumer_timeout`` of rabbitmq.conf if the broker knows how to
    (``has_timeouts``). Raises `ValueError` for a name that a user may not have.
    """
    if _NAME.fullmatch(vhost) is None:
        raise ValueError(f"{vhost!r} is not letters, digits, '-' and '_'")
    definitions: dict[str, Any] = json.loads(TEMPLATE.read_text())
    definitions["vhosts"] = [{"name": vhost}]
    for user in definitions["users"]:
        user["name"] = f"{vhost}-{user['name']}"
        # An administrator could change the virtual hosts of others.
        user["tags"] = ["management"] if user["tags"] else []
    for kind in ("permissions", "topic_permissions", "policies", "exchanges"):
        for entry in definitions[kind]:
            entry["vhost"] = vhost
    for entry in (*definitions["permissions"], *definitions["topic_permissions"]):
        role = entry["user"]
        entry["user"] = f"{vhost}-{role}"
        for verb in {"configure", "write", "read"} & entry.keys():
            # The queues of a publisher carry its name.
            entry[verb] = entry[verb].replace(rf"reply\.{role}\.", rf"reply\.{entry['user']}\.")
    for policy in definitions["policies"]:
        if has_timeouts and policy["name"] == _JOBS:
            policy["definition"]["consumer-timeout"] = _ANSWER_MS
    return definitions


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Write the users, permissions, exchanges and policies of definitions.json with "
        "the passwords of the environment, or of the files that it names."
    )
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="the file to write")
    parser.add_argument(
        "--mode",
        type=_octal,
        default=0o600,
        help="the file's permissions, in octal digits; without it only its owner can read it (600)",
    )
    parser.add_argument(
        "--shared",
        metavar="VHOST",
        help="for a broker that also serves others: change this virtual host alone, with users "
        "named VHOST-gateway and so on, none of whom is an administrator",
    )
    parser.add_argument(
        "--before-3.12",
        dest="is_old",
        action="store_true",
        help="with --shared: leave consumer-timeout out of the policy of jobs, because RabbitMQ "
        "before 3.12 refuses it",
    )
    given = parser.parse_args()
    if given.is_old and given.shared is None:
        parser.error("--before-3.12 needs --shared")
    definitions = json.loads(TEMPLATE.read_text())
    roles = [user["name"] for user in definitions["users"]]
    try:
        if given.shared is not None:
            definitions = shared(given.shared, has_timeouts=not given.is_old)
        users = [user["name"] for user in definitions["users"]]
        variables = {
            user: f"{role.upper()}_PASSWORD" for user, role in zip(users, roles, strict=True)
        }
        passwords = {name: _password(variable) for name, variable in variables.items()}
    except (OSError, ValueError) as error:
        parser.error(str(error))
    missing = [variables[name] for name, password in passwords.items() if not password]
    if missing:
        parser.error(f"no password in the environment: set {', '.join(missing)}")
    for user in definitions["users"]:
        user["password_hash"] = password_hash(passwords[user["name"]])
    try:
        _write(given.output, json.dumps(definitions, indent=2), given.mode)
    except OSError as error:
        parser.error(f"cannot write {given.output}: {error.strerror}")


def _password(variable: str) -> str:
    """The password in a variable, or in the file that ``variable``_FILE names; empty if there is
    none. Raises `OSError`, and `ValueError` if both are set."""
    password, path = os.environ.get(variable, ""), os.environ.get(f"{variable}_FILE")
    if not path:
        return password
    if password:
        raise ValueError(f"{variable} and {variable}_FILE are both set")
    return Path(path).read_text(encoding="utf-8").strip()


def _write(output: Path, text: str, mode: int) -> None:
    """At no time does the file give others more than ``mode``, even if it exists already."""
    with os.fdopen(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as file:
        os.fchmod(file.fileno(), mode)
        file.write(text)


def _octal(digits: str) -> int:
    return int(digits, 8)


if __name__ == "__main__":
    main()
