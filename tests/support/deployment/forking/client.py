"""Starts Python programs, as copies of the fork server where that makes no difference."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Protocol

import msgspec

from tests.support.deployment.forking.server import MAX_MESSAGE_BYTES, Answer, End, Request

_ROOT = Path(__file__).parents[4]
_ADDRESS = "WARREN_TEST_FORK_SERVER"
"""The variable with the path of the server's socket."""


class Process(Protocol):
    """The part of `subprocess.Popen` that tests use."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def terminate(self) -> None: ...


class Forked:
    """A process that the server has forked, and waits for."""

    def __init__(self, args: Sequence[str], pid: int, connection: socket.socket) -> None:
        self.args = args
        self.pid = pid
        self.returncode: int | None = None
        self._connection = connection
        self._receiving = threading.Lock()

    def poll(self) -> int | None:
        if self._receiving.acquire(blocking=False):  # otherwise another thread waits
            try:
                self._receive(0)
            finally:
                self._receiving.release()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, or the negative number of the signal. Raises
        `subprocess.TimeoutExpired`."""
        with self._receiving:
            self._receive(timeout)
        if self.returncode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def _receive(self, timeout: float | None) -> None:
        if self.returncode is not None:
            return
        self._connection.settimeout(timeout)
        with suppress(TimeoutError, BlockingIOError):
            data = self._connection.recv(MAX_MESSAGE_BYTES)
            self._connection.close()
            assert data, "the fork server has died"
            self.returncode = msgspec.json.decode(data, type=End).returncode

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class ForkServer:
    """The server of a test run, which imports nothing before the first request."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="warren-forks-")
        path = Path(self._directory.name) / "server"
        self._lifeline, theirs = socket.socketpair()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, theirs:
            listener.bind(str(path))
            listener.listen(64)
            numbers = (listener.fileno(), theirs.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.server", *map(str, numbers)],
                cwd=_ROOT,
                env=dict(os.environ),  # without variables of the C library that Python cannot see
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=numbers,
            )
        os.environ[_ADDRESS] = str(path)

    def close(self) -> None:
        """End the server. Processes that it has forked go on."""
        del os.environ[_ADDRESS]
        self._lifeline.close()
        self._process.wait()
        self._directory.cleanup()


def start(args: Sequence[str], *, cwd: Path, env: Mapping[str, str], log: IO[bytes]) -> Process:
    """``python ARGS``, which writes to ``log`` and reads nothing.

    The process is forked if there is a fork server, as in pytest, and if neither its directory nor
    a variable differs from the server's that may matter to an import.
    """
    address = os.environ.get(_ADDRESS)
    if address is not None and cwd == _ROOT:
        forked = _fork(address, args, env, log)
        if forked is not None:
            return forked
    return started(args, cwd=cwd, env=env, log=log)


def started(args: Sequence[str], *, cwd: Path, env: Mapping[str, str], log: IO[bytes]) -> Process:
    """The same as `start`, and never a copy."""
    return subprocess.Popen(
        [sys.executable, *args],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
    )


def _fork(
    address: str, args: Sequence[str], env: Mapping[str, str], log: IO[bytes]
) -> Forked | None:
    request = Request(list(args), dict(env))
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with Path(os.devnull).open("rb") as nothing:
        connection.connect(address)
        streams = [nothing.fileno(), log.fileno(), log.fileno()]
        socket.send_fds(connection, [msgspec.json.encode(request)], streams)
    data = connection.recv(MAX_MESSAGE_BYTES)
    assert data, "the fork server has died"
    answer = msgspec.json.decode(data, type=Answer)
    if answer.refused:
        connection.close()
        return None
    return Forked(args, answer.pid, connection)
