"""What the tests of all commands share."""

import logging
from collections.abc import Iterator

import pytest

from shared.telemetry import requests


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Undo what a command that runs in the test's process configures."""
    root, jobs = logging.getLogger(), logging.getLogger(requests.LOGGER)
    handlers, level, jobs_level = root.handlers[:], root.level, jobs.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    jobs.setLevel(jobs_level)
