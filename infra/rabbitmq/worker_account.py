"""Print the broker's definitions for a worker's user that can serve only some models.

Usage: python -m infra.rabbitmq.worker_account USER MODEL... > account.json

The output contains the permissions of the user, and the queues of the models with their bindings,
because the user may not bind them itself. Create the user before you import the definitions.
"""

import argparse
import json
import re
import sys
from typing import Any

from shared import topology
from shared.bus.base import Queue
from shared.bus.rabbit.encoding import queue_arguments

_USER = re.compile(r"[A-Za-z0-9_-]+")
_OWN_QUEUES = r"control\.worker\.[A-Za-z0-9_-]+(\.peers)?"
_WRITTEN = r"warren\.(jobs|suspects|replies|usage|workers|ledger)"
_READ = r"reply\.[A-Za-z0-9._-]+|warren\.(control|workers)"
_REPLIES = r"^reply\.[A-Za-z0-9._-]+$"
_COMMANDS = r"^worker\.[A-Za-z0-9_-]+$"


def definitions(user: str, models: list[str], vhost: str) -> dict[str, Any]:
    """What ``rabbitmqctl import_definitions`` reads. Raises ValueError if the name is not one that
    a user may have."""
    if _USER.fullmatch(user) is None:
        raise ValueError(f"{user!r} is not letters, digits, '-' and '_'")
    jobs = [
        topology.jobs_queue(model, lane) for model in models for lane in topology.DECLARED_LANES
    ]
    queues = [*jobs, topology.DEAD_LETTERS, topology.LEDGER_RECORDS]
    names = "|".join(re.escape(queue.name) for queue in jobs)
    where = {"user": user, "vhost": vhost}
    return {
        "permissions": [
            {
                **where,
                "configure": f"^({_OWN_QUEUES})$",
                "write": f"^({_OWN_QUEUES}|{_WRITTEN})$",
                "read": f"^({names}|{_OWN_QUEUES}|{_READ})$",
            }
        ],
        "topic_permissions": [
            {**where, "exchange": topology.REPLIES.name, "write": _REPLIES, "read": "^$"},
            {**where, "exchange": topology.CONTROL.name, "write": "^$", "read": _COMMANDS},
        ],
        "queues": [_described(queue, vhost) for queue in queues],
        "bindings": [
            {
                "source": binding.exchange.name,
                "vhost": vhost,
                "destination": queue.name,
                "destination_type": "queue",
                "routing_key": binding.routing_key,
                "arguments": {},
            }
            for queue in queues
            for binding in queue.bindings
        ],
    }


def _described(queue: Queue, vhost: str) -> dict[str, Any]:
    return {
        "name": queue.name,
        "vhost": vhost,
        "durable": True,
        "auto_delete": False,
        "arguments": queue_arguments(queue),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Limit a worker's user to some models.")
    parser.add_argument("user", metavar="USER", help="letters, digits, - and _")
    parser.add_argument("models", metavar="MODEL", nargs="+", help="a name under which it serves")
    parser.add_argument("--vhost", default="warren", help="the virtual host, by default warren")
    chosen = parser.parse_args()
    try:
        described = definitions(chosen.user, chosen.models, chosen.vhost)
    except ValueError as error:
        parser.error(str(error))
    sys.stdout.write(json.dumps(described, indent=2) + "\n")


if __name__ == "__main__":
    main()
