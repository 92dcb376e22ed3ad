"""Forks a process for each request: ``python -m tests.support.deployment.forking.server LISTENER
LIFELINE``, with the numbers of two descriptors.

A request is a message at the listener with the descriptors of the new process's standard streams.
Its connection is told the number of the process, and at the end of the process how it ended. The
server ends when the other end of the lifeline is closed; the processes do not.
"""

import gc
import importlib
import os
import runpy
import select
import selectors
import signal
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

IMPORTED = (
    *("cli.main", "gateway.app", "gateway.server", "worker.process.service", "uvloop"),
    *("worker.process.prepared_queues", "worker.decode.served_model", "worker.checkpoints.store"),
    *("worker.model.echo", "worker.engine.driver", "shared.bus.rabbit", "shared.telemetry.setup"),
)
"""The processes import what is missing here, which takes them longer."""
MAX_MESSAGE_BYTES = 1 << 18
FREE = ("WARREN_", "PYTEST_", "COLUMNS", "LINES", "TORCHINDUCTOR_", "TRITON_")
"""Beginnings of the names of variables that may have any value. The C library's readline and torch
set some in test processes, and the server imports no torch. Other variables may matter to a
module when it is imported, which was before the request."""


class Request(msgspec.Struct, frozen=True):
    """``python ARGS`` in the server's own directory."""

    args: list[str]
    variables: dict[str, str]


class Answer(msgspec.Struct, frozen=True):
    """``refused`` names the variables that differ from the server's, in which case there is no
    process."""

    pid: int = 0
    refused: list[str] = []


class End(msgspec.Struct, frozen=True):
    """``returncode`` is the exit status, or the negative number of the signal."""

    returncode: int


class Server:
    def __init__(self, listener: socket.socket, lifeline: int, variables: dict[str, str]) -> None:
        """``variables`` are those with which the server has started."""
        self._listener = listener
        self._lifeline = lifeline
        self._own = variables
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(lifeline, selectors.EVENT_READ)
        self._connections: dict[int, tuple[int, socket.socket]] = {}
        """Process and connection by the descriptor of the process."""

    def serve(self) -> Request | None:
        """Returns the request in the process that was forked for it, and nothing in the server,
        once the lifeline is closed."""
        while True:
            for key, _ in self._selector.select():
                if key.fd == self._lifeline:
                    return None
                if key.fd in self._connections:
                    self._report(key.fd)
                elif (request := self._take()) is not None:
                    return request

    def _take(self) -> Request | None:
        connection, _ = self._listener.accept()
        data, streams, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 3)
        if not data:  # the test process has ended
            connection.close()
            return None
        request = msgspec.json.decode(data, type=Request)
        refused = self._refused(request.variables)
        pid = 0 if refused else os.fork()
        if not refused and pid == 0:
            self._close()
            connection.close()
            become(request, streams, self._own)
            return request
        for stream in streams:
            os.close(stream)
        with suppress(BrokenPipeError):
            connection.send(msgspec.json.encode(Answer(pid, refused)))
        if refused:
            connection.close()
        else:
            process = os.pidfd_open(pid)
            self._connections[process] = (pid, connection)
            self._selector.register(process, selectors.EVENT_READ)
        return None

    def _refused(self, variables: dict[str, str]) -> list[str]:
        return sorted(
            name
            for name in self._own.keys() | variables.keys()
            if not name.startswith(FREE) and self._own.get(name) != variables.get(name)
        )

    def _report(self, process: int) -> None:
        pid, connection = self._connections.pop(process)
        self._selector.unregister(process)
        os.close(process)
        _, status = os.waitpid(pid, 0)
        end = End(os.waitstatus_to_exitcode(status))
        with connection, suppress(BrokenPipeError):
            connection.send(msgspec.json.encode(end))

    def _close(self) -> None:
        """Close all that the server has opened."""
        self._listener.close()
        os.close(self._lifeline)
        self._selector.close()
        for process, (_, connection) in self._connections.items():
            os.close(process)
            connection.close()


def become(request: Request, streams: list[int], own: Iterable[str]) -> None:
    """Have the state of a process that has just started with the request. Of the server's own
    variables nothing remains, of those that the imports have set everything."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in own:
        os.environ.pop(name, None)
    os.environ.update(request.variables)


def run(args: list[str]) -> None:
    """What ``python ARGS`` runs: a module with ``-m``, or a file."""
    if args[0] == "-m":
        sys.argv = args[1:]
        runpy.run_module(args[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = args
        sys.path[0] = str(Path(args[0]).resolve().parent)
        runpy.run_path(args[0], run_name="__main__")


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests and their processes
    listener = socket.socket(fileno=int(sys.argv[1]))
    lifeline = int(sys.argv[2])
    ready, _, _ = select.select([listener.fileno(), lifeline], [], [])
    if lifeline in ready:
        return
    variables = dict(os.environ)
    for name in IMPORTED:
        importlib.import_module(name)
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"a module has started {threads - 1} threads, which no copy would have"
    gc.freeze()  # a collection would write to the pages that all processes share
    request = Server(listener, lifeline, variables).serve()
    if request is not None:
        run(request.args)


if __name__ == "__main__":
    main()
