"""Write the broker's definitions with the deployment's passwords, before the broker starts.

Usage: python render_definitions.py OUTPUT, with GATEWAY_PASSWORD, WORKER_PASSWORD,
PUBLISHER_PASSWORD and OPERATOR_PASSWORD in the environment. Each can be read from a file instead,
which GATEWAY_PASSWORD_FILE and so on name. Nothing is written unless every user of
definitions.json has a password. Only the owner can read the file, so give it to the broker's user.
"""

import argparse
import base64
import hashlib
import json
import os
import secrets
from pathlib import Path

TEMPLATE = Path(__file__).with_name("definitions.json")
_SALT_BYTES = 4


def password_hash(password: str) -> str:
    """RabbitMQ's salted SHA-256, as its page "Credentials and Passwords" defines it."""
    salt = secrets.token_bytes(_SALT_BYTES)
    return base64.b64encode(salt + hashlib.sha256(salt + password.encode()).digest()).decode()


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
    given = parser.parse_args()
    definitions = json.loads(TEMPLATE.read_text())
    variables = {user["name"]: f"{user['name'].upper()}_PASSWORD" for user in definitions["users"]}
    try:
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
