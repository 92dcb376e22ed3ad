"""What the commands that serve say on a terminal."""

import io
import logging

import pytest
from rich.console import Console

from cli import serve


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    shown = io.StringIO()
    monkeypatch.setattr(serve, "notices", Console(file=shown, force_terminal=True, highlight=False))
    return shown


def start(level: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(level)
    with serve._loading("smollm2"):
        """Nothing else is to be done."""
    serve._say_ready("smollm2", "http://127.0.0.1:8000")


def test_with_log_lines_there_is_no_spinner_and_nothing_is_said_twice(
    terminal: io.StringIO, caplog: pytest.LogCaptureFixture
) -> None:
    start(logging.INFO, caplog)

    assert terminal.getvalue() == ""
    assert [record.message for record in caplog.records] == ["serving"]


def test_without_log_lines_a_terminal_shows_the_progress(
    terminal: io.StringIO, caplog: pytest.LogCaptureFixture
) -> None:
    start(logging.WARNING, caplog)

    assert "Loading smollm2 ..." in terminal.getvalue()
    assert "is listening on http://127.0.0.1:8000" in terminal.getvalue()
    assert caplog.records == []
