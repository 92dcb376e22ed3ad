"""Write the broker's definitions with the deployment's passwords, before the broker starts.

Usage: python render_definitions.py OUTPUT, with GATEWAY_PASSWORD, WORKER_PASSWORD,
PUBLISHER_PASSWORD and OPERATOR_PASSWORD in the environment. A user without a password keeps the
empty hash of definitions.json, with which RabbitMQ lets nobody log in.
"""

import base64
import hashlib
import json
import os
import secrets
import sys
from pathlib import Path

TEMPLATE = Path(__file__).with_name("definitions.json")
_SALT_BYTES = 4


def password_hash(password: str) -> str:
    """RabbitMQ's salted SHA-256, as its page "Credentials and Passwords" defines it."""
    salt = secrets.token_bytes(_SALT_BYTES)
    return base64.b64encode(salt + hashlib.sha256(salt + password.encode()).digest()).decode()


def main() -> None:
    definitions = json.loads(TEMPLATE.read_text())
    for user in definitions["users"]:
        password = os.environ.get(f"{user['name'].upper()}_PASSWORD")
        if password:
            user["password_hash"] = password_hash(password)
    output = Path(sys.argv[1])
    output.write_text(json.dumps(definitions, indent=2))
    output.chmod(0o644)  # the broker runs as another user, and hashes are not secrets to it


if __name__ == "__main__":
    main()
