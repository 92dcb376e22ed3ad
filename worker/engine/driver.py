"""The engine thread. Commands and outputs are all that it exchanges with other threads."""

import time
from queue import Empty, SimpleQueue
from threading import Thread

from worker.engine.engine import Engine
from worker.engine.interface import EngineCommand, EngineListener, EngineLoad, Submit
from worker.engine.step_times import StepTimes


class EngineThread:
    """The `TokenEngine` in this process. It runs steps while the engine has work, and sleeps
    otherwise.

    An error of a step or of the listener ends the thread.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: SimpleQueue[EngineCommand | None] = SimpleQueue()
        self._load = engine.load()
        self._busy_since: float | None = None
        self._thread: Thread | None = None

    def start(self, listener: EngineListener) -> None:
        self._thread = Thread(target=self._run, args=(listener,), name="engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current step, even if sequences are running, and close the
        engine."""
        self._commands.put(None)
        if self._thread is not None:
            self._thread.join()
        self._engine.close()

    def send(self, command: EngineCommand) -> None:
        """Queue a command to be applied before the next step. Thread-safe.

        Raises what `Engine.check` raises for a submit.
        """
        if isinstance(command, Submit):
            self._engine.check(command)
        self._commands.put(command)

    def load(self) -> EngineLoad:
        """The engine's load after its last step. Thread-safe."""
        return self._load

    @property
    def step_times(self) -> StepTimes:
        return self._engine.step_times

    @property
    def stalled_s(self) -> float:
        """Seconds for which there has been work without a completed step; 0 while idle."""
        busy_since = self._busy_since
        return 0.0 if busy_since is None else time.monotonic() - busy_since

    def _run(self, listener: EngineListener) -> None:
        try:
            while (commands := self._receive()) is not None:
                self._step(commands, listener)
        except BaseException as error:  # noqa: BLE001 (the process decides how to react)
            listener.hear_failure(error)
        finally:
            self._busy_since = None

    def _receive(self) -> list[EngineCommand] | None:
        """All queued commands, waiting for a command if the engine is idle; None: stop."""
        commands: list[EngineCommand] = []
        while True:
            try:
                command = self._commands.get(block=not (commands or self._engine.has_work))
            except Empty:
                return commands
            if command is None:
                return None
            commands.append(command)

    def _step(self, commands: list[EngineCommand], listener: EngineListener) -> None:
        self._busy_since = time.monotonic()
        outputs = self._engine.step(commands)
        self._load = self._engine.load()
        if not self._engine.has_work:
            self._busy_since = None
        charges = self._engine.take_charges()
        if outputs or charges:
            listener.hear_outputs(outputs, charges)
        if failed := self._engine.take_failed():
            listener.hear_failed(failed)
