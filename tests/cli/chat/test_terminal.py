"""``warren chat`` on a terminal: keys and pasted text, through a pseudo-terminal."""

import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.gateway.serving import served
from tests.support.workers.scripted_worker import MODEL

ROOT = Path(__file__).parents[3]
PASTE_BEGINS, PASTE_ENDS, ENTER = "\x1b[200~", "\x1b[201~", "\r"
TIMEOUT_S = 60.0


class Terminal:
    """A terminal in which a command runs."""

    def __init__(self, *command: str) -> None:
        self._ours, theirs = pty.openpty()
        self._shown = b""
        self.process = subprocess.Popen(
            [sys.executable, "warren.py", *command],
            cwd=ROOT,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            # Nobody answers when prompt_toolkit asks where the cursor is.
            env={**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"},
        )
        os.close(theirs)

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def wait_for(self, text: str) -> None:
        """Wait until ``text`` is shown after what was waited for before."""
        ends_at = time.monotonic() + TIMEOUT_S
        while text.encode() not in self._shown:
            left_s = ends_at - time.monotonic()
            ready, _, _ = select.select([self._ours], [], [], max(0.0, left_s))
            assert ready, f"{text!r} was not shown, but {self._shown!r}"
            self._shown += os.read(self._ours, 65536)
        self._shown = self._shown.partition(text.encode())[2]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    with served() as url:
        terminal = Terminal("chat", "--url", url, "--history", str(tmp_path / "history"))
        yield terminal
        terminal.close()


def test_pasted_lines_are_one_question(terminal: Terminal, tmp_path: Path) -> None:
    terminal.wait_for("you")
    terminal.type(f"{PASTE_BEGINS}first\nsecond\nthird{PASTE_ENDS}{ENTER}")
    terminal.wait_for(MODEL)  # which begins its answer
    terminal.wait_for("you")
    terminal.type(f"/save {tmp_path / 'chat.json'}{ENTER}")
    terminal.wait_for("2 messages are in")
    terminal.wait_for("you")
    terminal.type(f"/exit{ENTER}")

    assert terminal.process.wait(TIMEOUT_S) == 0
    messages = json.loads((tmp_path / "chat.json").read_text())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert messages[0]["content"] == "first\nsecond\nthird"
