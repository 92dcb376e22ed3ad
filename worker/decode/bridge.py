"""The event loop's interface to the engine: submits sequences and collects their tokens.

`EventPacing` decides how many of them gather for an event.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Self

from shared.errors import WarrenError
from worker.engine.interface import (
    CancelSequence,
    EngineLoad,
    Output,
    Promote,
    SequenceFailed,
    SequenceId,
    Submit,
    TokenEngine,
)
from worker.engine.step_times import StepTimes

_LOOK_INTERVAL_S = 0.5
_IDLE_S = 2.0
_MAX_CHANGE = 2.0
_GATHERED_S = 0.5
"""Seconds for which the tokens of a batch job are gathered, because no user watches them
arrive."""


class EventPacing:
    """Raises the number of tokens for an event until the event loop's thread keeps to its share of
    a core. No token waits longer than ``max_delay_s`` for the others.

    An event costs the worker, the broker and the reader a fraction of a millisecond, whether it has
    one token or ten. On a machine that computes on its CPU, or whose engine shares Python's lock
    with the event loop, that time is missing for tokens.
    """

    def __init__(
        self,
        cpu_share: float,
        max_delay_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """To be created and called in the thread of the event loop, whose CPU time ``cpu_clock``
        returns."""
        self.num_gathered = 1
        """How many tokens of each sequence gather."""
        self.max_delay_s = max_delay_s
        self._cpu_share = cpu_share
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._factor = 1.0
        self._num_steps = 0
        self._looked_at = clock()
        self._cpu_s = cpu_clock()

    def step(self) -> None:
        """Take note of a step of the engine, from which each running sequence has a token."""
        self._num_steps += 1
        elapsed_s = self._clock() - self._looked_at
        if elapsed_s < _LOOK_INTERVAL_S:
            return
        if elapsed_s < _IDLE_S:
            self._adjust(elapsed_s)
        self._num_steps = 0
        self._looked_at, self._cpu_s = self._clock(), self._cpu_clock()

    def _adjust(self, elapsed_s: float) -> None:
        share = (self._cpu_clock() - self._cpu_s) / elapsed_s
        change = min(max(share / self._cpu_share, 1 / _MAX_CHANGE), _MAX_CHANGE)
        step_s = elapsed_s / self._num_steps
        most = 1 + self.max_delay_s / step_s
        self._factor = min(max(self._factor * change, 1.0), most)
        self.num_gathered = int(self._factor)


class Generation:
    """The tokens of one request's sequences, in batches of all that have arrived.

    When the consumer is slow, because the broker is, batches become fewer and larger; the engine
    never blocks. The first tokens, the last ones of each sequence and errors are news at once;
    others gather, those of an interactive job as its pacing says.
    """

    def __init__(
        self,
        engine: TokenEngine,
        routes: dict[SequenceId, "Generation"],
        sequence_ids: Iterable[SequenceId],
        on_news: Callable[[], object],
        pacing: EventPacing,
        *,
        is_interactive: bool,
    ) -> None:
        """``routes`` says to which generation the engine's outputs go."""
        self._engine = engine
        self._routes = routes
        self._sequence_ids = tuple(sequence_ids)
        self._open = set(self._sequence_ids)
        routes.update(dict.fromkeys(self._sequence_ids, self))
        self._on_news = on_news
        self._pacing = pacing
        self._is_interactive = is_interactive
        self._has_begun = False
        self._is_due = False
        self._gathering: asyncio.TimerHandle | None = None
        self._outputs: list[Output] = []
        self._error: WarrenError | None = None

    def put(self, output: Output) -> None:
        if output.sequence_id not in self._open:
            return
        self._outputs.append(output)
        is_last = output.finish_reason is not None
        if is_last:
            self._open.discard(output.sequence_id)
        if is_last or not self._has_begun:
            self._has_begun = True
            self._announce()
        else:
            self._gather()

    def fail(self, failed: SequenceFailed) -> None:
        """Fail the request because one of its sequences failed."""
        if failed.sequence_id in self._open:
            self._open.discard(failed.sequence_id)
            self._error = failed.error
            self._announce()

    def take(self) -> list[Output]:
        """The tokens that have arrived since the last call, if they are news. Raises the error of a
        failed sequence, after the tokens that precede it."""
        if not self._is_due:
            return []
        if not self._outputs and self._error is not None:
            raise self._error
        self._is_due = self._error is not None
        outputs, self._outputs = self._outputs, []
        return outputs

    def cancel(self, sequence_id: SequenceId) -> None:
        """Cancel one sequence early, because a stop string was matched."""
        if sequence_id in self._open:
            self._open.discard(sequence_id)
            self._engine.send(CancelSequence(sequence_id))

    def promote(self) -> None:
        """Promote the sequences of a batch job to interactive priority."""
        self._is_interactive = True
        for sequence_id in self._open:
            self._engine.send(Promote(sequence_id))

    def close(self) -> None:
        """Cancel the sequences that are still running."""
        for sequence_id in self._sequence_ids:
            self.cancel(sequence_id)
            self._routes.pop(sequence_id, None)
        self._stop_gathering()

    def _gather(self) -> None:
        num_each = self._pacing.num_gathered
        is_enough = num_each == 1 or len(self._outputs) >= num_each * len(self._open)
        if self._is_interactive and is_enough:
            self._announce()
        elif self._gathering is None:
            delay_s = self._pacing.max_delay_s if self._is_interactive else _GATHERED_S
            loop = asyncio.get_running_loop()
            self._gathering = loop.call_later(delay_s, self._announce)

    def _announce(self) -> None:
        self._is_due = True
        self._stop_gathering()
        self._on_news()

    def _stop_gathering(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None


class Generations:
    """Runs the engine, and passes each of its outputs to the generation."""

    def __init__(self, engine: TokenEngine, pacing: EventPacing) -> None:
        self._pacing = pacing
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._generations: dict[SequenceId, Generation] = {}
        self._failure: asyncio.Future[None] = self._loop.create_future()
        self.ready, self.away = asyncio.Event(), asyncio.Event()
        """Exactly one of them is set: whether the engine can run sequences now."""
        self.ready.set()

    async def __aenter__(self) -> Self:
        self._engine.start(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._failure.cancel()
        await asyncio.to_thread(self._engine.stop)

    @property
    def load(self) -> EngineLoad:
        return self._engine.load()

    @property
    def step_times(self) -> StepTimes:
        return self._engine.step_times

    @property
    def stalled_s(self) -> float:
        """Seconds for which the engine has had work without completing a step."""
        return self._engine.stalled_s

    async def watch(self) -> None:
        """Raise the error that ended the engine, when it ends."""
        await self._failure

    def open(self, submits: Sequence[Submit], on_news: Callable[[], object]) -> Generation:
        """Run these sequences until they end or the generation is closed. ``on_news`` is called
        when there is something to take. Raises what `Engine.check` raises."""
        sequence_ids = [submit.sequence_id for submit in submits]
        generation = Generation(
            self._engine,
            self._generations,
            sequence_ids,
            on_news,
            self._pacing,
            is_interactive=any(submit.job_class == "interactive" for submit in submits),
        )
        try:
            for submit in submits:
                self._engine.send(submit)
        except BaseException:
            generation.close()
            raise
        return generation

    def hear_outputs(self, outputs: Sequence[Output]) -> None:
        self._loop.call_soon_threadsafe(self._dispatch, outputs)

    def hear_failed(self, failed: Sequence[SequenceFailed]) -> None:
        self._loop.call_soon_threadsafe(self._dispatch_failed, failed)

    def hear_failure(self, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(self._fail, error)

    def hear_ready(self, is_ready: bool) -> None:
        self._loop.call_soon_threadsafe(self._mark_ready, is_ready)

    def _dispatch(self, outputs: Sequence[Output]) -> None:
        self._pacing.step()
        for output in outputs:
            generation = self._generations.get(output.sequence_id)
            if generation is not None:
                generation.put(output)

    def _dispatch_failed(self, failed: Sequence[SequenceFailed]) -> None:
        for one in failed:
            if (generation := self._generations.get(one.sequence_id)) is not None:
                generation.fail(one)

    def _fail(self, error: BaseException) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    def _mark_ready(self, is_ready: bool) -> None:
        gone, come = (self.away, self.ready) if is_ready else (self.ready, self.away)
        gone.clear()
        come.set()
