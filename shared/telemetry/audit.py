"""The audit log: refused logins and administrative acts, each with its tenant and key id.

Records go to the logger ``warren.audit``, and to a file of JSON lines if there is one. They never
contain keys, prompts or answers.
"""

import json
import logging
import logging.handlers
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TypeAlias

from shared.errors import StartupError

logger = logging.getLogger("warren.audit")
logger.setLevel(logging.INFO)

Act: TypeAlias = Literal[
    "login refused",
    "access refused",
    "operator's request",
    "API key changed",
    "API key added",
    "API key rotated",
    "API key revoked",
    "dead letters requeued",
    "dead letters dropped",
    "usage records erased",
    "tenant erased",
]
_MAX_REFUSALS = 20
"""Refusals that are recorded in a second, so that a flood of them does not fill the disk."""


def record(act: Act, *, tenant: str = "", key_id: str = "", **facts: object) -> None:
    """Record what was done, or refused, and who did it."""
    logger.info(act, extra={"audit": {"tenant": tenant, "key_id": key_id, **facts}})


class Refusals:
    """Records refusals, at most so many in a second; the next one says how many were left out."""

    def __init__(self) -> None:
        self._second = 0
        self._num_recorded = 0
        self._num_left_out = 0

    def record(self, act: Act, *, tenant: str, key_id: str, **facts: object) -> None:
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._num_recorded = second, 0
        if self._num_recorded >= _MAX_REFUSALS:
            self._num_left_out += 1
            return
        self._num_recorded += 1
        if self._num_left_out:
            facts["num_left_out"], self._num_left_out = self._num_left_out, 0
        record(act, tenant=tenant, key_id=key_id, **facts)


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
        return json.dumps({"time": at, "act": record.getMessage(), **facts}, ensure_ascii=False)
