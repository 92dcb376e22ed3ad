"""An engine that stands still when a test wants it to, so that no answer ends before its time."""

import asyncio
import dataclasses
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from worker.decode.served_model import ServedModel
from worker.engine.driver import EngineThread
from worker.engine.interface import EngineCommand, EngineListener

T = TypeVar("T")


class Brake:
    """Lets an engine run a number of steps, and no more until a test allows them.

    A step computes the tokens of which the next step hands out the results: an engine that runs
    one sequence has handed out n tokens after n + 1 steps.
    """

    def __init__(self, num_steps: int = 0) -> None:
        self._steps = threading.Semaphore(num_steps)
        self._is_released = threading.Event()

    def allow(self, num_steps: int) -> None:
        self._steps.release(num_steps)

    async def allow_until(self, outcome: Coroutine[Any, Any, T]) -> T:
        """Allow one step after another until ``outcome`` is there, which it returns. A fixed number
        of steps may go to a sequence that the engine has yet to hear is cancelled."""
        task = asyncio.ensure_future(outcome)
        while not task.done():
            self.allow(1)
            await asyncio.wait([task], timeout=0.01)
        return task.result()

    def release(self) -> None:
        """Let the engine run freely from now on."""
        self._is_released.set()
        self._steps.release()

    def wait(self) -> None:
        """Wait until the next step is allowed."""
        if not self._is_released.is_set():
            self._steps.acquire()

    def on(self, thread: EngineThread) -> EngineThread:
        """The same engine, with this brake."""
        return _BrakedThread(thread, self)

    def on_engine_of(self, model: ServedModel) -> ServedModel:
        assert isinstance(model.engine, EngineThread)
        return dataclasses.replace(model, engine=self.on(model.engine))


class _BrakedThread(EngineThread):
    def __init__(self, thread: EngineThread, brake: Brake) -> None:
        super().__init__(thread._engine)
        self._brake = brake

    def stop(self) -> None:
        self._commands.put(None)  # so that it ends after the step that waits
        self._brake.release()
        super().stop()

    def _step(self, commands: list[EngineCommand], listener: EngineListener) -> None:
        self._brake.wait()
        super()._step(commands, listener)
