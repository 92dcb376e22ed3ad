"""A process that the fork server copies cannot be told from a process that was started."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.deployment.forking.client import Forked, Process, start, started
from tests.support.deployment.processes import ROOT

WITNESS = """
import atexit, json, os, random, signal, sys, threading
here = os.listdir("/proc/self/fd")
atexit.register(print, "the end")
print(json.dumps({
    "arguments": sys.argv,
    "descriptors": len(here),
    "directory": os.getcwd(),
    "group": os.getpgrp(),
    "handlers": [str(signal.getsignal(number)) for number in signal.valid_signals()],
    "input": sys.stdin.read(),
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "name": __name__,
    "number": random.random(),
    "path": sys.path,
    "session": os.getsid(0),
    "threads": threading.active_count(),
    "umask": os.umask(0),
    "variables": dict(os.environ),
}))
sys.exit(7)
"""
Start = Callable[..., Process]


def ran(start: Start, program: str, directory: Path, **variables: str) -> tuple[Process, list[str]]:
    """A process that has run a program, and the lines that it has written."""
    path = directory / "program.py"
    path.write_text(program)
    env = {**os.environ, **variables}
    with (directory / "log").open("wb") as log:
        process = start([str(path), "--option", "value"], cwd=ROOT, env=env, log=log)
    process.wait(60)
    return process, (directory / "log").read_text().splitlines()


def test_a_copy_has_all_that_a_started_process_has(tmp_path: Path) -> None:
    given = {"WARREN_SECRET": "of this process alone"}

    copy, (copied, *copied_end) = ran(start, WITNESS, tmp_path, **given)
    other, (expected, *expected_end) = ran(started, WITNESS, tmp_path, **given)

    assert (type(copy), type(other)) == (Forked, subprocess.Popen)
    has, expects = json.loads(copied), json.loads(expected)
    assert has.pop("number") != expects.pop("number")
    assert has == expects
    assert has["variables"]["WARREN_SECRET"] == given["WARREN_SECRET"]
    assert (copied_end, copy.wait()) == (expected_end, other.wait()) == (["the end"], 7)


def test_copies_draw_different_numbers(tmp_path: Path) -> None:
    numbers = [json.loads(ran(start, WITNESS, tmp_path)[1][0])["number"] for _ in range(2)]

    assert len(set(numbers)) == 2


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("", 0),
        ("raise SystemExit('a message')", 1),
        ("1 / 0", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import os; os._exit(130)", 130),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
    ],
)
def test_a_copy_ends_as_a_started_process_does(program: str, status: int, tmp_path: Path) -> None:
    ends: list[tuple[Any, ...]] = []
    for way in (start, started):
        process, lines = ran(way, program, tmp_path)
        ends.append((process.wait(), lines[-1:]))

    assert ends[0] == ends[1]
    assert ends[0][0] == status


def test_a_copy_obeys_signals(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text("import time; print('begun', flush=True); time.sleep(600)")
    with (tmp_path / "log").open("wb") as log:
        process = start([str(path)], cwd=ROOT, env=os.environ, log=log)

    process.send_signal(signal.SIGSTOP)
    state = ""
    while state != "T" and process.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.01)
        state = Path(f"/proc/{process.pid}/stat").read_text().split()[2]
    process.send_signal(signal.SIGCONT)
    was_running = process.poll() is None
    process.terminate()

    assert was_running
    assert process.wait(60) == -signal.SIGTERM
    assert process.poll() == -signal.SIGTERM


def test_a_process_with_another_environment_is_started(tmp_path: Path) -> None:
    """A module may read any variable when it is imported."""
    process, lines = ran(start, "import os; print(os.environ['LANG'])", tmp_path, LANG="xx")

    assert isinstance(process, subprocess.Popen)
    assert lines == ["xx"]
