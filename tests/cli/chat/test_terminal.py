"""``warren chat`` through a pseudo-terminal: edited lines, history and pasted text."""

import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.support import PATIENCE_S
from tests.support.gateway.serving import served
from tests.support.workers.scripted_worker import MODEL

ROOT = Path(__file__).parents[3]
PASTE_BEGINS, PASTE_ENDS, ENTER = "\x1b[200~", "\x1b[201~", "\r"
UP, LEFT, RIGHT = "\x1b[A", "\x1b[D", "\x1b[C"


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
        ends_at = time.monotonic() + PATIENCE_S
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


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served() as url:
        yield url


@contextmanager
def chatting(url: str, history: Path) -> Iterator[Terminal]:
    """A terminal in which the chat waits for a question."""
    with closing(Terminal("chat", "--url", url, "--history", str(history))) as terminal:
        terminal.wait_for("you")
        yield terminal


def ask(terminal: Terminal, keys: str) -> None:
    """Type a question, and wait until it is answered."""
    terminal.type(f"{keys}{ENTER}")
    terminal.wait_for(MODEL)  # which begins its answer
    terminal.wait_for("you")


def leave(terminal: Terminal, file: Path) -> list[str]:
    """Save the conversation and leave; returns the questions."""
    terminal.type(f"/save {file}{ENTER}")
    terminal.wait_for("messages are in")
    terminal.wait_for("you")
    terminal.type(f"/exit{ENTER}")
    assert terminal.process.wait(PATIENCE_S) == 0
    messages = json.loads(file.read_text())["messages"]
    assert [message["role"] for message in messages[:2]] == ["user", "assistant"]
    return [message["content"] for message in messages if message["role"] == "user"]


def test_pasted_lines_are_one_question(url: str, tmp_path: Path) -> None:
    with chatting(url, tmp_path / "history") as terminal:
        ask(terminal, f"{PASTE_BEGINS}first\nsecond\nthird{PASTE_ENDS}")
        questions = leave(terminal, tmp_path / "chat.json")

    assert questions == ["first\nsecond\nthird"]


def test_a_line_is_edited_with_the_arrow_keys(url: str, tmp_path: Path) -> None:
    with chatting(url, tmp_path / "history") as terminal:
        ask(terminal, f"on thre{LEFT * 5}e two{RIGHT * 5}e")
        questions = leave(terminal, tmp_path / "chat.json")

    assert questions == ["one two three"]


def test_earlier_questions_are_recalled_also_in_a_new_session(url: str, tmp_path: Path) -> None:
    with chatting(url, tmp_path / "history") as terminal:
        ask(terminal, "first")
        ask(terminal, "second")
        ask(terminal, f"{UP}{UP} again")
        questions = leave(terminal, tmp_path / "first.json")

    assert questions == ["first", "second", "first again"]

    with chatting(url, tmp_path / "history") as terminal:
        ask(terminal, UP * 3)  # before /exit and /save
        questions = leave(terminal, tmp_path / "second.json")

    assert questions == ["first again"]
