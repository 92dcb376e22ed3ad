"""Runs an engine's command: ``python -m worker.engines.guard COMMAND...``.

The worker holds the other end of standard input. When that closes, however the worker has ended,
the guard ends the command with all of its processes. When the command ends, the guard does so with
its exit status.
"""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

_GRACE_S = 10.0
_NOT_FOUND = 127


def main(command: list[str]) -> int:
    # The guard must outlive the signals that a terminal sends to all processes of a worker.
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    try:
        engine = subprocess.Popen(  # noqa: S603 (the operator's own command)
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_restore_signals,  # no other thread runs yet
        )
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        return _NOT_FOUND
    threading.Thread(target=_end_with_worker, args=(engine,), daemon=True).start()
    status = engine.wait()
    _kill(engine.pid, signal.SIGKILL)  # what it has left behind
    return status if status >= 0 else 128 - status


def _restore_signals() -> None:
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_DFL)


def _end_with_worker(engine: "subprocess.Popen[bytes]") -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    _kill(engine.pid, signal.SIGTERM)
    _kill(engine.pid, signal.SIGCONT)  # a process that is stopped would not hear it
    with suppress(subprocess.TimeoutExpired):
        engine.wait(_GRACE_S)
    _kill(engine.pid, signal.SIGKILL)


def _kill(group: int, signum: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signum)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
