"""What the tests of all commands share."""

from collections.abc import Iterator

import pytest

from tests.support.deployment.command import logging_is_kept


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Undo what a command that runs in the test's process configures."""
    with logging_is_kept():
        yield
