"""The event loop's interface to the engine: submits sequences and collects their tokens.

`EventPace` decides how many of them gather for an event.
"""

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from shared.errors import WarrenError
from worker.engine.interface import (
    CancelSequence,
    Charges,
    EngineLoad,
    Output,
    Promote,
    SequenceFailed,
    SequenceId,
    StepOutput,
    Submit,
    TokenEngine,
)
from worker.engine.step_times import StepTimes

_BATCH_EVENTS_PER_S = 2.0
"""No user watches the tokens of a batch job arrive."""
NUM_AT_ONCE = 10
"""The first tokens of an interactive sequence, which a user waits for."""
_TOLERANCE = 0.25
"""The part of an interval by which an event may be early, so that it leaves with the tokens of a
step rather than wait for the next step, or late, so that it has the tokens of the next step."""


class EventPace:
    """When the next event of a stream is due: at most ``events_per_s`` in the long run, after the
    first ``num_at_once`` tokens.

    An event costs the worker, the broker and the gateway about a millisecond of CPU together,
    whether it has one token or ten, and nobody sees more than ten updates of a text in a second.
    """

    def __init__(self, events_per_s: float, num_at_once: int) -> None:
        self._interval_s = 1 / events_per_s
        self._num_at_once = num_at_once
        self._due_at = -math.inf

    @property
    def due_at_latest(self) -> float:
        """When tokens that wait are due even if no others arrive."""
        return self._due_at + _TOLERANCE * self._interval_s

    def arrived(self, now: float) -> bool:
        """Take note of a token; returns whether an event with it is due at once."""
        self._num_at_once -= 1
        return self._num_at_once >= 0 or now >= self._due_at - _TOLERANCE * self._interval_s

    def sent(self, now: float) -> None:
        """Take note of an event."""
        # An event that was early does not bring the next event forward.
        since = now if self._num_at_once >= 0 else max(now, self._due_at)
        self._due_at = since + self._interval_s


@dataclass(frozen=True, slots=True)
class News:
    """The outputs that have arrived for a job."""

    outputs: Sequence[Output]
    is_due: bool
    """Whether the text of all tokens so far is to be published now."""


class Generation:
    """The tokens of a request's sequences, in batches of all that have arrived.

    When the consumer is slow, because the broker is, batches become fewer and larger; the engine
    never blocks. The first tokens, the last tokens of each sequence and errors are due at once;
    others gather, as the pace says.
    """

    def __init__(
        self,
        engine: TokenEngine,
        routes: dict[SequenceId, "Generation"],
        sequence_ids: Iterable[SequenceId],
        on_news: Callable[[], object],
        pace: EventPace,
        *,
        interactive_pace: Callable[[], EventPace],
        reads_each: bool = False,
    ) -> None:
        """``routes`` says to which generation the engine's outputs go. ``interactive_pace`` is the
        pace of a batch job that was promoted. ``reads_each``: all tokens are news at once, because
        the text may end the answer; tokens that are not due are published later."""
        self._engine = engine
        self._routes = routes
        self._sequence_ids = tuple(sequence_ids)
        self._open = set(self._sequence_ids)
        routes.update(dict.fromkeys(self._sequence_ids, self))
        self._on_news = on_news
        self._pace = pace
        self._interactive_pace = interactive_pace
        self._reads_each = reads_each
        self.compute_s = 0.0
        """The machine time that its sequences have used."""
        self._is_due = False
        self._loop = asyncio.get_running_loop()
        self._alarm: asyncio.TimerHandle | None = None
        self._outputs: list[Output] = []
        self._error: WarrenError | None = None

    def put(self, output: Output) -> None:
        if output.sequence_id not in self._open:
            return
        self._outputs.append(output)
        is_last = output.finish_reason is not None
        if is_last:
            self._open.discard(output.sequence_id)
        is_token = isinstance(output, StepOutput)
        if not is_token or self._pace.arrived(self._loop.time()) or is_last:
            self._announce()
            return
        if self._alarm is None and not self._is_due:
            self._alarm = self._loop.call_at(self._pace.due_at_latest, self._announce)
        if self._reads_each:
            self._on_news()

    def fail(self, failed: SequenceFailed) -> None:
        """Fail the request because one of its sequences failed."""
        if failed.sequence_id in self._open:
            self._open.discard(failed.sequence_id)
            self._error = failed.error
            self._announce()

    def take(self) -> News | None:
        """The tokens that have arrived since the last call, if there is news. Raises the error of a
        failed sequence, after the tokens that precede it."""
        if not self._is_due and not (self._reads_each and self._outputs):
            return None
        if not (self._outputs or self._reads_each) and self._error is not None:
            raise self._error
        news = News(self._outputs, self._is_due)
        self._outputs = []
        if self._is_due:
            self._is_due = False
            self._pace.sent(self._loop.time())
            self._stop_alarm()
        if self._error is not None:
            self._is_due, self._reads_each = True, False
        return news

    def cancel(self, sequence_id: SequenceId) -> None:
        """Cancel a sequence early, because a stop string was matched."""
        if sequence_id in self._open:
            self._open.discard(sequence_id)
            self._engine.send(CancelSequence(sequence_id))

    def promote(self) -> None:
        """Promote the sequences of a batch job to interactive priority."""
        self._pace = self._interactive_pace()
        for sequence_id in self._open:
            self._engine.send(Promote(sequence_id))

    def close(self) -> None:
        """Cancel the sequences that are still running."""
        for sequence_id in self._sequence_ids:
            self.cancel(sequence_id)
            self._routes.pop(sequence_id, None)
        self._stop_alarm()

    def _announce(self) -> None:
        self._is_due = True
        self._stop_alarm()
        self._on_news()

    def _stop_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None


class Generations:
    """Runs the engine, and passes each of its outputs to the generation."""

    def __init__(self, engine: TokenEngine, events_per_s: float) -> None:
        """``events_per_s``: the most events of an interactive stream in a second."""
        self._events_per_s = events_per_s
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

    def open(
        self,
        submits: Sequence[Submit],
        on_news: Callable[[], object],
        *,
        each_token: bool = False,
        reads_each: bool = False,
    ) -> Generation:
        """Run these sequences until they end or the generation is closed. ``on_news`` is called
        when there is something to take. With ``each_token`` every token is due at once; for
        ``reads_each`` see `Generation`. Raises what `Engine.check` raises."""
        sequence_ids = [submit.sequence_id for submit in submits]
        events_per_s = math.inf if each_token else self._events_per_s

        def interactive() -> EventPace:
            return EventPace(events_per_s, NUM_AT_ONCE * len(sequence_ids))

        is_paced = each_token or any(submit.job_class == "interactive" for submit in submits)
        generation = Generation(
            self._engine,
            self._generations,
            sequence_ids,
            on_news,
            interactive() if is_paced else EventPace(_BATCH_EVENTS_PER_S, 1),
            interactive_pace=interactive,
            reads_each=reads_each,
        )
        try:
            for submit in submits:
                self._engine.send(submit)
        except BaseException:
            generation.close()
            raise
        return generation

    def hear_outputs(self, outputs: Sequence[Output], charges: Charges) -> None:
        self._loop.call_soon_threadsafe(self._dispatch, outputs, charges)

    def hear_failed(self, failed: Sequence[SequenceFailed]) -> None:
        self._loop.call_soon_threadsafe(self._dispatch_failed, failed)

    def hear_failure(self, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(self._fail, error)

    def hear_ready(self, is_ready: bool) -> None:
        self._loop.call_soon_threadsafe(self._mark_ready, is_ready)

    def _dispatch(self, outputs: Sequence[Output], charges: Charges) -> None:
        for sequence_id, seconds in charges.items():  # before the end of an answer records them
            if (charged := self._generations.get(sequence_id)) is not None:
                charged.compute_s += seconds
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
