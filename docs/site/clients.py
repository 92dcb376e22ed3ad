"""The table of clients that are run against Warren, from their stored results."""

import json
from collections.abc import Mapping
from itertools import starmap
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "tests" / "clients" / "results.json"
DEPLOYMENTS = ("serve", "rabbitmq", "llama-server")
_HEADER = """\
| Client | Version | Checked | `warren serve` | RabbitMQ | RabbitMQ, llama-server |
|---|---|---|---|---|---|"""


def client_table() -> str:
    rows = starmap(row, sorted(json.loads(RESULTS.read_text()).items()))
    return "\n".join((_HEADER, *rows))


def row(client: str, result: Mapping[str, Any]) -> str:
    """A client, its version, what was checked, and the result in each deployment."""
    if reason := result.get("missing"):
        return f"| {client} | | not run: {reason} | | | |"
    runs = [result.get(name, {}) for name in DEPLOYMENTS]
    checks = dict.fromkeys(check for run in runs for check in run)
    cells = [client, result["version"], ", ".join(checks), *map(_summary, runs)]
    return f"| {' | '.join(cells)} |"


def _summary(verdicts: Mapping[str, str]) -> str:
    if not verdicts:
        return "not run"
    failed = [check for check, verdict in verdicts.items() if verdict != "ok"]
    passed = f"{len(verdicts) - len(failed)} of {len(verdicts)}"
    return f"{passed}; failed: {', '.join(failed)}" if failed else passed
