"""What the process that compiles constraints may do."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from shared.grammars import Trials
from shared.messages import Constraint

CONFINED = """
import os, socket, sys
from shared.grammars.confinement import confine
confine()
attempts = (
    lambda: open("/etc/passwd"),
    lambda: os.listdir("/"),
    lambda: os.mkdir("confined"),
    lambda: socket.socket(),
    lambda: os.fork(),
    lambda: os.execv("/bin/true", ["true"]),
    lambda: os.kill(os.getppid(), 0),
)
for attempt in attempts:
    try:
        attempt()
    except PermissionError:
        print("refused")
print(len(bytearray(1 << 26)))
"""


def test_a_confined_process_has_memory_and_its_open_files_only() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", CONFINED],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )

    assert ran.stdout.split() == ["refused"] * 7 + [str(1 << 26)], ran.stderr


def test_the_sandbox_is_confined_and_has_none_of_the_secrets(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WARREN_SECRET", "of the service")
    others = set(psutil.Process().children())
    trials = Trials()

    assert not trials.problem_now(Constraint(kind="regex", source="a"))

    (process,) = set(psutil.Process().children()) - others
    assert set(process.environ()) <= {"PYTHONPATH", "LC_CTYPE"}
    assert "Seccomp:\t2" in Path(f"/proc/{process.pid}/status").read_text()
    assert "grammar sandbox not confined" not in caplog.messages
