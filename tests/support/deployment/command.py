"""``warren ARGS`` in the test's own process, for commands that end soon: a process of its own takes
half a second to import what they need."""

import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from unittest import mock

import pytest

from cli.main import main


@dataclass(frozen=True)
class Ended:
    """What a process would have left, if neither its input nor its output were a terminal."""

    returncode: int
    stdout: str
    stderr: str


def warren(*args: str, typed: str = "", **env: str) -> Ended:
    """Run a command with this input and these additional environment variables."""
    stdout, stderr = io.StringIO(), io.StringIO()
    variables = {"COLUMNS": "120", "TERM": "dumb", **env}
    with (
        redirect_stdout(stdout),
        redirect_stderr(stderr),
        mock.patch.object(sys, "argv", ["warren", *args]),
        mock.patch.object(sys, "stdin", io.StringIO(typed)),
        mock.patch.dict(os.environ, variables),
        logging_is_kept(),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    assert isinstance(ended.value.code, int)
    return Ended(ended.value.code, stdout.getvalue(), stderr.getvalue())


@contextmanager
def logging_is_kept() -> Iterator[None]:
    """Undo what a command configures for the whole process."""
    root = logging.getLogger()
    levels, handlers = {one: one.level for one in _loggers()}, root.handlers[:]
    root.handlers.clear()  # which the configuration would close
    try:
        yield
    finally:
        root.handlers[:] = handlers
        for one in _loggers():
            one.setLevel(levels.get(one, logging.NOTSET))


def _loggers() -> list[logging.Logger]:
    root = logging.getLogger()
    named = root.manager.loggerDict.values()
    return [root, *(one for one in named if isinstance(one, logging.Logger))]
