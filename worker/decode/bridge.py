"""The event loop's interface to the engine thread: submits sequences and awaits their tokens."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Self

from shared.errors import WarrenError
from worker.engine.driver import EngineThread
from worker.engine.engine import Engine, Output
from worker.engine.interface import (
    CancelSequence,
    EngineLoad,
    Promote,
    SequenceFailed,
    SequenceId,
    StepOutput,
    Submit,
)


class Generation:
    """An iterator over the tokens of one request's sequences, in batches of all that have arrived.

    When the consumer is slow, because the broker is, batches become fewer and larger; the engine
    never blocks. Leaving the ``async with`` cancels sequences that are still running.
    """

    def __init__(self, engine: EngineThread, sequence_ids: Sequence[SequenceId]) -> None:
        self._engine = engine
        self._open = set(sequence_ids)
        self._outputs: list[Output] = []
        self._error: WarrenError | None = None
        self._has_news = asyncio.Event()

    def put(self, output: Output) -> None:
        if output.sequence_id not in self._open:
            return
        self._outputs.append(output)
        if output.finish_reason is not None:
            self._open.discard(output.sequence_id)
        self._has_news.set()

    def fail(self, failed: SequenceFailed) -> None:
        """Fail the request because one of its sequences failed."""
        if failed.sequence_id in self._open:
            self._open.discard(failed.sequence_id)
            self._error = failed.error
            self._has_news.set()

    def close(self, sequence_id: SequenceId) -> None:
        """Cancel one sequence early, because a stop string was matched."""
        if sequence_id in self._open:
            self._open.discard(sequence_id)
            self._engine.send(CancelSequence(sequence_id))

    def promote(self) -> None:
        """Promote the sequences of a batch job to interactive priority."""
        for sequence_id in self._open:
            self._engine.send(Promote(sequence_id))

    def close_all(self) -> None:
        for sequence_id in tuple(self._open):
            self.close(sequence_id)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Output]:
        """Raises the error of a failed sequence, after the tokens that precede it."""
        if not self._outputs and not self._open and self._error is None:
            raise StopAsyncIteration
        await self._has_news.wait()
        if not self._outputs and self._error is not None:
            raise self._error
        self._has_news.clear()
        outputs, self._outputs = self._outputs, []
        if self._error is not None:
            self._has_news.set()
        return outputs


class Generations:
    """Owns the engine thread and passes each of its outputs to the generation that awaits it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = EngineThread(engine, self._on_outputs, self._on_failed, self._on_failure)
        self._loop = asyncio.get_running_loop()
        self._generations: dict[SequenceId, Generation] = {}
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self._failure: asyncio.Future[None] = self._loop.create_future()

    async def __aenter__(self) -> Self:
        self._engine.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._failure.cancel()
        await asyncio.to_thread(self._engine.stop)

    @property
    def load(self) -> EngineLoad:
        return self._engine.load()

    @property
    def stalled_s(self) -> float:
        """Seconds for which the engine has had work without completing a step."""
        return self._engine.stalled_s

    async def watch(self) -> None:
        """Raise the error that ended the engine thread, when it ends."""
        await self._failure

    @asynccontextmanager
    async def open(self, submits: Sequence[Submit]) -> AsyncIterator[Generation]:
        """Run these sequences; those that are unfinished at the end of the ``async with`` are
        cancelled."""
        self.num_prompt_tokens += sum(
            len(submit.prompt_ids) for submit in submits if submit.leader is None
        )
        generation = Generation(self._engine, [submit.sequence_id for submit in submits])
        try:
            for submit in submits:
                self._generations[submit.sequence_id] = generation
                self._engine.send(submit)
            yield generation
        finally:
            generation.close_all()
            for submit in submits:
                self._generations.pop(submit.sequence_id, None)

    def _on_outputs(self, outputs: Sequence[Output]) -> None:
        self._loop.call_soon_threadsafe(self._dispatch, outputs)

    def _on_failed(self, failed: list[SequenceFailed]) -> None:
        self._loop.call_soon_threadsafe(self._dispatch_failed, failed)

    def _on_failure(self, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(self._fail, error)

    def _dispatch(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            if isinstance(output, StepOutput):
                self.num_generated_tokens += 1
            generation = self._generations.get(output.sequence_id)
            if generation is not None:
                generation.put(output)

    def _dispatch_failed(self, failed: list[SequenceFailed]) -> None:
        for one in failed:
            if (generation := self._generations.get(one.sequence_id)) is not None:
                generation.fail(one)

    def _fail(self, error: BaseException) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)
