"""What has to be back where it began once everybody has gone home."""

import time

from tests.support.broker import RabbitNode

_PATIENCE_S = 60


def wait_clean(node: RabbitNode) -> None:
    """Return once no job is left, no delivery is in anybody's hands, and no log but those that
    gateways hold ready is kept. Raises `AssertionError` when that never comes."""
    deadline = time.monotonic() + _PATIENCE_S
    while left := _leftovers(node):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.5)


def _leftovers(node: RabbitNode) -> list[str]:
    columns = ("name", "messages_ready", "messages_unacknowledged", "consumers")
    lines = node.ctl("--silent", "list_queues", "--vhost", "warren", *columns).splitlines()
    rows = [line.split("\t") for line in lines if line.count("\t") == len(columns) - 1]
    left = []
    for name, ready, unacknowledged, consumers in rows:
        if not ready.isdigit() or name == "jobs.dead":
            continue
        is_spare_log = name.startswith("reply.") and consumers == "1"
        if int(ready) + int(unacknowledged) or (name.startswith("reply.") and not is_spare_log):
            left.append(f"{name}: {ready} ready, {unacknowledged} in hands")
    return left
