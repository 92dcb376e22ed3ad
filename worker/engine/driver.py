"""The engine's thread. Commands go in and outputs come out; nothing else is shared with it."""

import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from threading import Thread

from worker.engine.engine import Command, Engine, Output
from worker.engine.interface import EngineLoad, SequenceFailed, Submit

OnOutputs = Callable[[Sequence[Output]], None]
OnFailed = Callable[[list[SequenceFailed]], None]
OnFailure = Callable[[BaseException], None]


class EngineThread:
    """Steps the engine while it has work and sleeps while it has none.

    The callbacks run in the engine's thread and must not block: ``on_outputs`` after each step that
    yielded tokens, ``on_failed`` after each that ended sequences without one, ``on_failure`` once,
    with what a step or a callback raised, after which the thread has ended and commands are no
    longer obeyed.
    """

    def __init__(
        self, engine: Engine, on_outputs: OnOutputs, on_failed: OnFailed, on_failure: OnFailure
    ) -> None:
        self._engine = engine
        self._on_outputs = on_outputs
        self._on_failed = on_failed
        self._on_failure = on_failure
        self._commands: SimpleQueue[Command | None] = SimpleQueue()
        self._load = engine.load()
        self._busy_since: float | None = None
        self._thread = Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current step, whatever still runs, and close the engine."""
        self._commands.put(None)
        self._thread.join()
        self._engine.close()

    def send(self, command: Command) -> None:
        """Have a command obeyed before the next step. Called from any thread.

        Raises for a submit what `Engine.check` raises.
        """
        if isinstance(command, Submit):
            self._engine.check(command)
        self._commands.put(command)

    def load(self) -> EngineLoad:
        """How full the engine was after its last step. Called from any thread."""
        return self._load

    @property
    def stalled_s(self) -> float:
        """For how long there has been work and no step has ended; 0 while idle."""
        busy_since = self._busy_since
        return 0.0 if busy_since is None else time.monotonic() - busy_since

    def _run(self) -> None:
        try:
            while (commands := self._receive()) is not None:
                self._step(commands)
        except BaseException as error:  # noqa: BLE001 (what to do about it is the process's choice)
            self._on_failure(error)
        finally:
            self._busy_since = None

    def _receive(self) -> list[Command] | None:
        """All commands that came, at least one of them if there is nothing to do; None: stop."""
        commands: list[Command] = []
        while True:
            try:
                command = self._commands.get(block=not (commands or self._engine.has_work))
            except Empty:
                return commands
            if command is None:
                return None
            commands.append(command)

    def _step(self, commands: list[Command]) -> None:
        self._busy_since = time.monotonic()
        outputs = self._engine.step(commands)
        self._load = self._engine.load()
        if not self._engine.has_work:
            self._busy_since = None
        if outputs:
            self._on_outputs(outputs)
        if failed := self._engine.take_failed():
            self._on_failed(failed)
