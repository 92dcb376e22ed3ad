"""The log lines about requests and jobs that were written while a test ran."""

import logging
from collections.abc import Iterable
from typing import Any

import pytest

from shared.telemetry import job_lines


def job_records(caplog: pytest.LogCaptureFixture, *steps: str) -> list[dict[str, Any]]:
    """The fields of these lines, or of all, in order, with ``step``."""
    return [
        {**vars(record), "step": record.message}
        for record in caplog.records
        if record.name == job_lines.LOGGER and (not steps or record.message in steps)
    ]


def texts(records: Iterable[logging.LogRecord]) -> str:
    """Everything in these records, as one text."""
    return "\n".join(str(vars(record)) for record in records)
