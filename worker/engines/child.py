"""An engine as a child process of the worker: it is started, watched, and started again."""

import logging
import os
import shlex
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from typing import IO

from shared.backoff import Backoff
from shared.settings import PREFIX

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 1.0
_MAX_PAUSE_S = 60.0
_LASTED_S = 60.0
"""Seconds after which an engine counts as started well, so that the pauses begin anew."""
_LAST_LINES = 5
_END_S = 15.0
_LAST_LINES_S = 1.0
"""How long the last lines of an engine that has ended are waited for."""


class EngineProcess:
    """The engine's command under a guard (`worker.engines.guard`), which ends it with the worker.

    Its lines are written to the worker's log. After each exit it is started again, with pauses that
    double up to a minute.
    """

    def __init__(self, name: str, command: str) -> None:
        self._name = name
        """Raises `ValueError` if the command's quotes do not match, or if it is empty."""
        self._command = shlex.split(command)
        if not self._command:
            raise ValueError("it is empty")
        self.num_exits = 0
        self.last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._stopping = threading.Event()
        self._guard: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="engine process", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the engine; returns when it has ended."""
        self._stopping.set()
        self.end()
        self._thread.join(_END_S)

    def end(self) -> None:
        """End the engine's processes, after which they are started again unless `stop` is
        called."""
        with self._lock:
            if self._guard is not None and self._guard.stdin is not None:
                with suppress(OSError):
                    self._guard.stdin.close()

    def _run(self) -> None:
        backoff = Backoff(_FIRST_PAUSE_S, _MAX_PAUSE_S, steady_s=_LASTED_S)
        while not self._stopping.is_set():
            began_at = time.monotonic()
            status = self._run_once()
            if self._stopping.is_set():
                return
            self.num_exits += 1
            backoff.lasted(time.monotonic() - began_at)
            pause_s = backoff.pause_s
            facts = {"engine": self._name, "status": status, "started_again_after_s": pause_s}
            logger.error("engine process ended", extra=facts)
            self._stopping.wait(pause_s)

    def _run_once(self) -> int | None:
        """Run the command until it ends; returns its exit status, or None if it cannot be
        started."""
        try:
            with self._lock:
                self._guard = guard = self._new_guard()
        except OSError as error:  # there is no memory, or no descriptor, for another process
            self._hear(f"{self._command[0]} cannot be started: {error}")
            return None
        if self._stopping.is_set():
            self.end()
        logger.info("engine process started", extra={"engine": self._name, "pid": guard.pid})
        assert guard.stdout is not None
        # Not here: a process that has left the engine's group may keep the pipe open.
        reading = threading.Thread(
            target=self._read, args=(guard.stdout,), name="engine lines", daemon=True
        )
        reading.start()
        status = guard.wait()
        self.end()
        reading.join(_LAST_LINES_S)
        return status

    def _new_guard(self) -> "subprocess.Popen[str]":
        # The engine must not learn the broker's password and other secrets of the worker.
        environment = {
            name: value
            for name, value in os.environ.items()  # noqa: TID251 (they are the engine's)
            if not name.startswith(PREFIX)
        }
        return subprocess.Popen(  # noqa: S603 (the operator's own command)
            [sys.executable, "-m", f"{__package__}.guard", *self._command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            text=True,
            errors="replace",
        )

    def _read(self, pipe: IO[str]) -> None:
        with pipe as lines:
            for line in lines:
                self._hear(line.rstrip())

    def _hear(self, line: str) -> None:
        self.last_lines.append(line)
        logger.info("engine says", extra={"engine": self._name, "line": line})
