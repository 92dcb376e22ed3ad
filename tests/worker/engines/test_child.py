"""An engine as a child process."""

import logging
import os
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from worker.engines.child import EngineProcess

PATIENCE_S = 240.0
SLEEPER = "import os, time; print('here', os.getpid(), flush=True); time.sleep(600)"
PARENT = (
    "import subprocess, sys; "
    f"subprocess.Popen([sys.executable, '-c', {SLEEPER!r}]); "
    f"exec({SLEEPER!r})"
)


def wait_until(is_true: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < until
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def pids_in(process: EngineProcess) -> list[int]:
    return [int(line.split()[1]) for line in process.last_lines if line.startswith("here")]


def command_of(code: str) -> str:
    return shlex.join([sys.executable, "-c", code])


def test_the_lines_of_an_engine_are_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    process = EngineProcess("vllm", command_of(SLEEPER))
    process.start()
    wait_until(lambda: bool(pids_in(process)))
    process.stop()

    (said,) = (vars(one) for one in caplog.records if one.message == "engine says")
    assert (said["engine"], said["line"].split()[0]) == ("vllm", "here")


def test_an_engine_ends_with_all_of_its_processes() -> None:
    process = EngineProcess("vllm", command_of(PARENT))
    process.start()
    wait_until(lambda: len(pids_in(process)) == 2)
    pids = pids_in(process)

    process.stop()

    wait_until(lambda: not any(map(is_alive, pids)))


def test_an_engine_that_ends_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.engines.child._FIRST_PAUSE_S", 0.01)
    process = EngineProcess("vllm", command_of("print('here 1')"))
    process.start()
    wait_until(lambda: process.num_exits >= 2)
    process.stop()

    assert pids_in(process)[:2] == [1, 1]


def test_a_command_that_does_not_exist_ends_with_a_line_that_says_so() -> None:
    process = EngineProcess("vllm", "no-such-engine --port 1")
    process.start()
    wait_until(lambda: process.num_exits >= 1)
    process.stop()

    assert "no-such-engine: No such file or directory" in process.last_lines
