"""The audit log: refused logins and administrative acts, each with its tenant and key id, or with
the person who has signed in.

Records go to the logger ``warren.audit``, and to a file of JSON lines if the settings name a file.
They never contain keys, prompts or answers.
"""

import json
import logging
import logging.handlers
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TypeAlias

from shared.errors import StartupError
from shared.printable import printable_json
from shared.telemetry import floods

logger = logging.getLogger("warren.audit")
logger.setLevel(logging.INFO)

Act: TypeAlias = Literal[
    "signed in",
    "signed out",
    "sessions ended",
    "login refused",
    "access refused",
    "refusals left out",
    "operator's request",
    "API key changed",
    "API key added",
    "API key rotated",
    "API key revoked",
    "dead letters requeued",
    "dead letters dropped",
    "usage records erased",
    "tenant erased",
    "tenant limits changed",
    "model removed",
]
Refusal: TypeAlias = Literal["login refused", "access refused"]


def record(
    act: Act, *, tenant: str = "", key_id: str = "", person: str = "", **facts: object
) -> None:
    """Record what was done, or refused, and who did it: ``person`` if somebody has signed in."""
    who = {"tenant": tenant, "key_id": key_id, **({"person": person} if person else {})}
    logger.info(act, extra={"audit": {**who, **facts}})


class Refusals:
    """Records refusals, so that a flood of them neither fills the disk nor hides other refusals.

    Refusals that name a known key have a budget for each key, and all anonymous refusals share
    another budget. A record at the end of a flood says how many refusals were left out.
    """

    def __init__(self, limiter: floods.Limiter | None = None) -> None:
        self._limiter = floods.Limiter(record_left_out) if limiter is None else limiter

    def record(
        self, act: Refusal, *, tenant: str, key_id: str, person: str = "", **facts: object
    ) -> None:
        if self._limiter.allows(act, key_id):
            record(act, tenant=tenant, key_id=key_id, person=person, **facts)


def record_left_out(event: floods.FloodEvent, left_out: Mapping[str, int]) -> None:
    """Record how many refusals about ``event`` were left out, by key."""
    for key_id, number in left_out.items():
        record("refusals left out", key_id=key_id, of=event, num_left_out=number)


def write_to(path: Path) -> logging.Handler:
    """Append the records to a file, too, which may be moved away at any time; returns the handler.
    Raises `StartupError`."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600))
        handler = logging.handlers.WatchedFileHandler(path, encoding="utf-8")
    except OSError as error:
        raise StartupError(f"the audit log {path} cannot be written: {error.strerror}") from None
    handler.setFormatter(_JsonLines())
    logger.addHandler(handler)
    return handler


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        facts = getattr(record, "audit", {})
        line = json.dumps({"time": at, "act": record.getMessage(), **facts}, ensure_ascii=False)
        return printable_json(line)
