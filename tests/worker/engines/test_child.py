"""An engine as a child process."""

import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from worker.engines.child import EngineProcess

PATIENCE_S = 240.0
SLEEPER = "import os, time; print('here', os.getpid(), flush=True); time.sleep(600)"
LEAVER = (
    "import subprocess, sys; "
    f"left = subprocess.Popen([sys.executable, '-c', {SLEEPER!r}], start_new_session=True); "
    "print('here', left.pid)"
)
"""Ends, and leaves a process that is in no group of its own."""
WITH_NAMES = (
    "import os; print([name for name in ('WARREN_BROKER', 'CUDA_VISIBLE_DEVICES') "
    "if name in os.environ])"
)
WORKER = (
    "import sys, time; from worker.engines.child import EngineProcess; "
    "process = EngineProcess('vllm', sys.argv[1]); process.start(); "
    "exec('while not process.last_lines: time.sleep(0.01)'); "
    "print(process.last_lines[0].split()[1], flush=True); time.sleep(600)"
)
"""A worker's part that starts an engine, and says the process id that the engine says."""
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


def test_an_engine_whose_child_keeps_its_lines_open_is_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker.engines.child._FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("worker.engines.child._LAST_LINES_S", 0.1)
    process = EngineProcess("vllm", command_of(LEAVER))
    process.start()
    wait_until(lambda: process.num_exits >= 2 and len(pids_in(process)) >= 2)
    process.stop()

    for pid in pids_in(process):
        os.kill(pid, signal.SIGKILL)


def test_an_engine_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.engines.child._FIRST_PAUSE_S", 0.01)
    process = EngineProcess("vllm", command_of("print('here 1')"))
    with monkeypatch.context() as without_programs:
        without_programs.setattr(sys, "executable", "/no/such/program")
        process.start()
        wait_until(lambda: process.num_exits >= 1)
        failed = [line for line in process.last_lines if "cannot be started" in line]
    wait_until(lambda: bool(pids_in(process)))
    process.stop()

    assert failed


def test_an_engine_does_not_learn_the_worker_s_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARREN_BROKER", "amqp://user:password@broker")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    process = EngineProcess("vllm", command_of(WITH_NAMES))
    process.start()
    wait_until(lambda: bool(process.last_lines))
    process.stop()

    assert process.last_lines[0] == "['CUDA_VISIBLE_DEVICES']"


def test_an_engine_ends_with_a_worker_that_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WORKER, command_of(SLEEPER)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as worker:
        assert worker.stdout is not None
        pid = int(worker.stdout.readline())
        assert is_alive(pid)

        worker.kill()

    wait_until(lambda: not is_alive(pid))


@pytest.mark.parametrize("command", ["vllm serve 'model", ""])
def test_a_command_that_is_none_is_refused(command: str) -> None:
    with pytest.raises(ValueError, match=r"quotation|empty"):
        EngineProcess("vllm", command)


def test_a_command_that_does_not_exist_ends_with_a_line_that_says_so() -> None:
    process = EngineProcess("vllm", "no-such-engine --port 1")
    process.start()
    wait_until(lambda: process.num_exits >= 1)
    process.stop()

    assert "no-such-engine: No such file or directory" in process.last_lines
