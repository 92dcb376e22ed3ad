"""The stored results of each client's last run, from which a page of the documentation is made."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("results.json")
"""By client: its version and, by deployment, the verdict of each check; or what is missing."""

Verdicts = Mapping[str, str]
"""By check."""


def store_run(client: str, version: str, deployment: str, verdicts: Verdicts) -> None:
    """Replace the client's results in this deployment, and forget results of other versions."""
    stored = _stored()
    before = stored.get(client, {})
    kept = before if before.get("version") == version else {}
    stored[client] = {**kept, "version": version, deployment: dict(verdicts)}
    _store(stored)


def store_missing(client: str, reason: str) -> None:
    """Store that a client could not be run. Results that it has are kept."""
    stored = _stored()
    stored.setdefault(client, {"missing": reason})
    _store(stored)


def _stored() -> dict[str, Any]:
    return dict(json.loads(PATH.read_text())) if PATH.exists() else {}


def _store(results: Mapping[str, Any]) -> None:
    PATH.write_text(json.dumps(results, indent=2) + "\n")
