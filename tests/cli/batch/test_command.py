"""The command ``warren batch``, in a process of its own."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.workers.batch_files import chat_line, write_lines

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--broker=amqp://publisher:secret@127.0.0.1:{}/warren", "Workers go on with the jobs"),
        ("--url=http://127.0.0.1:{}", "A batch that was created continues"),
    ],
)
def test_after_ctrl_c_it_says_what_continues(option: str, said: str, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", chat_line("a"))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        command = subprocess.Popen(
            [
                *(sys.executable, "warren.py", "batch", str(source), str(tmp_path / "out.jsonl")),
                option.format(silent.getsockname()[1]),
            ],
            cwd=ROOT,
            text=True,
            stderr=subprocess.PIPE,
        )
        connection, _ = silent.accept()
        with connection:
            command.send_signal(signal.SIGINT)
            _, shown = command.communicate(timeout=60)

    assert command.returncode == 130
    assert shown.startswith("Stopped. ")
    assert said in shown
