"""The heart: one step of all sequences at a time, planned while the step before it computes."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from shared.errors import ContextLengthExceeded
from worker.engine.block_pool import BlockPool
from worker.engine.interface import (
    Cancel,
    EngineLoad,
    ModelRunner,
    ScheduledBatch,
    SequenceId,
    StepHandle,
    StepOutput,
    Submit,
)
from worker.engine.scheduler import Scheduler, SchedulerLimits
from worker.engine.sequence import Sequence
from worker.engine.step_plan import StepPlan

Command: TypeAlias = Submit | Cancel


@dataclass(frozen=True, slots=True)
class _Launch:
    """A step that computes. Row r of its result belongs to ``plan.sampled[r]``."""

    handle: StepHandle
    plan: StepPlan
    launched_at: float


class Engine:
    """Runs sequences on a model runner. Used by one thread at a time; `check` by any.

    When `step` raises, the engine's picture of the runner is no longer true: it must not be used
    again.
    """

    def __init__(
        self,
        runner: ModelRunner,
        limits: SchedulerLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``clock`` says the time in seconds: the engine learns how long its steps take."""
        pool = BlockPool(runner.num_blocks, runner.block_size)
        self.max_seq_len = min(runner.max_seq_len, pool.num_slots)
        """Longest prompt and output together that this engine can run, in tokens."""
        self._runner = runner
        self._pool = pool
        self._scheduler = Scheduler(limits, pool)
        self._clock = clock
        self._collected_at = clock()
        self._sequences: dict[SequenceId, Sequence] = {}
        self._num_submitted = 0
        self._in_flight: _Launch | None = None

    @property
    def has_work(self) -> bool:
        return bool(self._sequences) or self._in_flight is not None

    def step(self, commands: Iterable[Command] = ()) -> list[StepOutput]:
        """Obey, launch the next step, and return the tokens of the one before it.

        Waits until that step before is computed. Raises what the runner raises, and `ValueError`
        for a submit that `check` refuses or whose id is in use.
        """
        self._obey(commands)
        computing = self._in_flight
        self._in_flight = self._launch(self._scheduler.schedule())
        return self._collect(computing)

    def check(self, submit: Submit) -> None:
        """Refuse what can never run.

        Raises `ContextLengthExceeded` for prompt and output that exceed `max_seq_len`, and
        `ValueError` for a submit that is wrong in itself.
        """
        token_ids = [*submit.prompt_ids, *submit.output_ids]
        if not submit.prompt_ids:
            raise ValueError("a prompt needs at least one token")
        if min(token_ids) < 0 or max(token_ids) >= self._runner.vocab_size:
            raise ValueError(f"a token id lies outside 0 .. {self._runner.vocab_size - 1}")
        if submit.max_tokens <= len(submit.output_ids):
            raise ValueError(
                f"max_tokens is {submit.max_tokens} and {len(submit.output_ids)} are there already"
            )
        if len(submit.prompt_ids) + submit.max_tokens > self.max_seq_len:
            raise ContextLengthExceeded(
                f"{len(submit.prompt_ids)} tokens in the prompt and {submit.max_tokens} in the "
                f"completion exceed the {self.max_seq_len} that fit"
            )

    def load(self) -> EngineLoad:
        num_waiting = self._scheduler.num_waiting
        return EngineLoad(
            num_running=len(self._sequences) - num_waiting,
            num_waiting=num_waiting,
            num_blocks=self._pool.num_blocks,
            num_free_blocks=self._pool.num_free,
            num_preemptions=self._scheduler.num_preemptions,
            num_begun_tokens=self._scheduler.num_begun_tokens,
            num_cached_tokens=self._scheduler.num_cached_tokens,
        )

    def close(self) -> None:
        """Release the runner, and with it the device."""
        self._runner.close()

    def check_invariants(self) -> None:
        """Assert between steps that all blocks and sequences are accounted for."""
        self._scheduler.check_invariants()
        rows = self._in_flight.plan.sampled if self._in_flight is not None else []
        for sequence in self._sequences.values():
            assert sequence.num_pending == rows.count(sequence)

    def _obey(self, commands: Iterable[Command]) -> None:
        for command in commands:
            if isinstance(command, Submit):
                self._submit(command)
            else:
                self._cancel(command)

    def _submit(self, submit: Submit) -> None:
        self.check(submit)
        if submit.sequence_id in self._sequences:
            raise ValueError(f"sequence {submit.sequence_id} runs already")
        sequence = Sequence(submit, arrival=self._num_submitted)
        self._num_submitted += 1
        self._sequences[submit.sequence_id] = sequence
        self._scheduler.add(sequence)

    def _cancel(self, cancel: Cancel) -> None:
        sequence = self._sequences.get(cancel.sequence_id)
        if sequence is not None:
            self._end(sequence)

    def _launch(self, plan: StepPlan) -> _Launch | None:
        if not plan.shares:
            return None
        launched_at = self._clock()
        return _Launch(self._runner.launch(ScheduledBatch(plan.shares)), plan, launched_at)

    def _collect(self, launch: _Launch | None) -> list[StepOutput]:
        if launch is None:
            return []
        rows = zip(launch.plan.sampled, launch.handle.result(), strict=True)
        self._learn(launch)
        # Those that were cancelled, or ended by the token before, have no use for another.
        return [self._advance(sequence, token) for sequence, token in rows if not sequence.is_ended]

    def _learn(self, launch: _Launch) -> None:
        """A step takes from its launch, or from the end of the one before, to its result."""
        began_at = max(launch.launched_at, self._collected_at)
        self._collected_at = self._clock()
        self._scheduler.learn(launch.plan.work, self._collected_at - began_at)

    def _advance(self, sequence: Sequence, token_id: int) -> StepOutput:
        finish_reason = sequence.append(token_id)
        if finish_reason is not None:
            self._end(sequence)
        return StepOutput(
            sequence.submit.sequence_id, token_id, finish_reason, sequence.num_cached or 0
        )

    def _end(self, sequence: Sequence) -> None:
        sequence.is_ended = True
        self._scheduler.remove(sequence)
        del self._sequences[sequence.submit.sequence_id]
