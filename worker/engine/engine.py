"""The engine: runs all sequences step by step, and plans each step while the previous one runs."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from math import isnan
from operator import attrgetter

from shared.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    NotFinite,
    OutOfMemory,
    WarrenError,
)
from worker.engine.cache.block_pool import BlockPool
from worker.engine.charges import divided
from worker.engine.interface import (
    NO_TOKEN,
    CancelSequence,
    Charges,
    EngineCommand,
    EngineLoad,
    ModelRunner,
    Output,
    Promote,
    PromptScored,
    ScheduledBatch,
    SequenceFailed,
    SequenceId,
    StepFailed,
    StepHandle,
    StepOutput,
    StepScores,
    Submit,
    TokenScore,
)
from worker.engine.scheduler import Scheduler, SchedulerLimits
from worker.engine.sequence import Sequence
from worker.engine.sequence_cache import SequenceCache
from worker.engine.step_plan import StepPlan
from worker.engine.step_times import StepFacts, StepTimes

MAX_PREPARATION_S = 0.1
"""Seconds that a step spends on constraints, before it leaves the others to the next step.

The mask of a JSON schema takes well below a millisecond. Without this limit, a request with a mask
of 80 ms and many choices would delay the tokens of all other requests by seconds.
"""

_NO_SCORES = StepScores({}, ())


@dataclass(frozen=True, slots=True)
class _Launch:
    """A launched step. Row r of its result belongs to ``plan.rows[r]``."""

    handle: StepHandle
    plan: StepPlan
    launched_at: float


class Engine:
    """Runs sequences on a model runner. Not thread-safe, except for `check`.

    After `step` has raised, the engine's state no longer matches the runner's: it must not be used
    again.
    """

    def __init__(
        self,
        runner: ModelRunner,
        limits: SchedulerLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``clock`` returns the time in seconds; the engine uses it to learn how long steps
        take."""
        cache = SequenceCache(
            BlockPool(runner.num_blocks, runner.block_size),
            runner.groups,
            max_step_tokens=limits.max_num_batched_tokens,
            has_prefixes=limits.prefix_cache,
        )
        self.max_seq_len = cache.longest(runner.max_seq_len)
        """Maximum length of prompt and output together that this engine can run, in tokens."""
        self.step_times = StepTimes()
        self._last_step: StepFacts | None = None
        self._runner = runner
        self._cache = cache
        self._scheduler = Scheduler(limits, cache)
        self._clock = clock
        self._collected_at = clock()
        self._sequences: dict[SequenceId, Sequence] = {}
        self._num_submitted = 0
        self._in_flight: _Launch | None = None
        self._failed: list[SequenceFailed] = []
        self._charges: Charges = {}
        self._followers: dict[SequenceId, list[Sequence]] = {}
        """Sequences that wait for their leader to compute the shared prompt, by leader."""
        self._unprepared: deque[Sequence] = deque()
        """Sequences whose next draw has to be prepared, the longest wait first."""

    @property
    def has_work(self) -> bool:
        return bool(self._sequences) or self._in_flight is not None

    def step(self, commands: Iterable[EngineCommand] = ()) -> Items[Output]:
        """Run the loop once: apply commands, schedule, launch, and collect the previous step's
        results.

        Waits for the previous step; if the next draws depend on its tokens, it does so before
        scheduling. If the previous step raised `StepFailed`, one of its sequences ends (see
        `take_failed`) and the others are recomputed. A sequence whose logits are not finite ends,
        too, without an effect on others. Raises any other error of the runner, and
        `ValueError` for a submit that `check` rejects or whose id is in use.
        """
        self._obey(commands)
        computing = self._in_flight
        if computing is not None and computing.plan.needs_result:
            outputs = self._collect(computing)
            self._in_flight = self._launch(self._schedule())
            return outputs
        self._in_flight = self._launch(self._schedule())
        return self._collect(computing)

    def check(self, submit: Submit) -> None:
        """Reject a submit that can never run.

        Raises `ContextLengthExceeded` if prompt and output exceed `max_seq_len`, and `ValueError`
        for a submit that is invalid in itself.
        """
        if not submit.prompt_ids:
            raise ValueError("a prompt needs at least one token")
        self._check_ids(submit.output_ids)
        if submit.leader is None:  # followers share their leader's prompt
            self._check_ids(submit.prompt_ids)
        is_only_scored = submit.scores_prompt and not submit.max_tokens and not submit.output_ids
        if is_only_scored and len(submit.prompt_ids) == 1:
            raise ValueError("the first token of a prompt has no score")
        if submit.max_tokens <= len(submit.output_ids) and not is_only_scored:
            raise ValueError(
                f"max_tokens is {submit.max_tokens} and {len(submit.output_ids)} are there already"
            )
        if len(submit.prompt_ids) + submit.max_tokens > self.max_seq_len:
            raise ContextLengthExceeded(
                f"{len(submit.prompt_ids)} tokens in the prompt and {submit.max_tokens} in the "
                f"completion exceed the {self.max_seq_len} that fit"
            )

    def _check_ids(self, token_ids: Items[int]) -> None:
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= self._runner.vocab_size):
            raise ValueError(f"a token id lies outside 0 .. {self._runner.vocab_size - 1}")

    def take_failed(self) -> list[SequenceFailed]:
        """The sequences that ended without a last token since the previous call."""
        failed, self._failed = self._failed, []
        return failed

    def take_charges(self) -> Charges:
        """Whose the duration of the step was that the last call of `step` completed. It belongs to
        the sequences of the step that had not ended before, by their tokens in it."""
        charges, self._charges = self._charges, {}
        return charges

    def load(self) -> EngineLoad:
        num_waiting = self._scheduler.num_waiting + sum(map(len, self._followers.values()))
        num_waiting_batch = self._scheduler.num_waiting_batch + sum(
            follower.is_batch for followers in self._followers.values() for follower in followers
        )
        return EngineLoad(
            num_running=len(self._sequences) - num_waiting,
            num_waiting=num_waiting,
            num_blocks=self._cache.num_blocks,
            num_free_blocks=self._cache.num_free_blocks,
            num_preemptions=self._scheduler.num_preemptions,
            num_begun_tokens=self._scheduler.num_begun_tokens,
            num_cached_tokens=self._scheduler.num_cached_tokens,
            num_running_batch=sum(s.is_batch for s in self._sequences.values()) - num_waiting_batch,
            num_waiting_batch=num_waiting_batch,
            num_drafted={**self._scheduler.num_drafted},
            num_accepted={**self._scheduler.num_accepted},
            last_step=self._last_step,
            block_counts=self._cache.block_counts,
        )

    def close(self) -> None:
        """Release the runner, and with it the device."""
        self._runner.close()

    def check_invariants(self) -> None:
        """Assert between steps that all blocks and sequences are accounted for."""
        self._scheduler.check_invariants()
        rows = self._in_flight.plan.rows if self._in_flight is not None else []
        for sequence in self._sequences.values():
            assert sequence.num_pending + sequence.num_drafts == rows.count(sequence)

    def _obey(self, commands: Iterable[EngineCommand]) -> None:
        for command in commands:
            match command:
                case Submit():
                    self._submit(command)
                case CancelSequence(sequence_id):
                    if (sequence := self._sequences.get(sequence_id)) is not None:
                        self._end(sequence)
                case Promote(sequence_id):
                    if (sequence := self._sequences.get(sequence_id)) is not None:
                        self._scheduler.promote(sequence)

    def _submit(self, submit: Submit) -> None:
        self.check(submit)
        if submit.sequence_id in self._sequences:
            raise ValueError(f"sequence {submit.sequence_id} is already running")
        sequence = Sequence(submit, arrival=self._num_submitted)
        self._num_submitted += 1
        self._sequences[submit.sequence_id] = sequence
        if not sequence.is_prepared:
            self._unprepared.append(sequence)
        leader = self._sequences.get(submit.leader) if submit.leader is not None else None
        if leader is None or leader.has_prompt:
            self._scheduler.add(sequence)
        else:
            self._followers.setdefault(leader.submit.sequence_id, []).append(sequence)

    def _schedule(self) -> StepPlan:
        until = self._clock() + MAX_PREPARATION_S
        self._prepare(until)
        plan = self._scheduler.schedule(lambda: self._clock() < until)
        for leader in [*self._followers]:
            if self._sequences[leader].has_prompt:
                self._release(leader)
        return plan

    def _prepare(self, until: float) -> None:
        """Prepare the next draw, and further draws while the step has time."""
        while self._unprepared:
            sequence = self._unprepared.popleft()
            if sequence.is_ended:
                continue
            try:
                sequence.prepare()
            except InvalidRequest as error:
                self._fail(sequence, error)
            if self._clock() > until:
                return

    def _release(self, leader: SequenceId) -> None:
        """Let the followers of ``leader`` join the next step, in which they find its prompt in the
        cache."""
        for follower in self._followers.pop(leader, ()):
            if not follower.is_ended:
                self._scheduler.add(follower)

    def _launch(self, plan: StepPlan) -> _Launch | None:
        if not plan.shares:
            return None
        launched_at = self._clock()
        return _Launch(self._runner.launch(ScheduledBatch(plan.shares)), plan, launched_at)

    def _collect(self, launch: _Launch | None) -> list[Output]:
        if launch is None:
            return []
        try:
            token_ids = launch.handle.result()
            scores = launch.handle.scores() if launch.plan.has_scores else _NO_SCORES
        except StepFailed:
            self._recover(launch.plan)
            return []
        self._learn(launch)
        launch.plan.keep_predictions(scores.predicted)
        # A sequence has no use for another token if it was cancelled, if its previous token ended
        # it, or if that token was not as drafted.
        outputs: list[Output] = []
        for sequence, prompt_scores in zip(launch.plan.scored, scores.prompts, strict=True):
            if sequence.is_ended:
                continue
            if any(isnan(score.logprob) for score in prompt_scores):
                self._fail_not_finite(sequence)
            else:
                outputs.append(self._advance_prompt(sequence, prompt_scores))
        previous = None
        for row, (sequence, token_id) in enumerate(zip(launch.plan.rows, token_ids, strict=True)):
            if not sequence.is_ended and sequence.num_pending:
                is_predicted = sequence is previous
                score = scores.drawn.get(row)
                if token_id == NO_TOKEN or (score is not None and isnan(score.logprob)):
                    self._fail_not_finite(sequence)
                else:
                    if is_predicted:
                        self._scheduler.accept(sequence)
                    outputs.append(
                        self._advance(sequence, token_id, score, is_predicted=is_predicted)
                    )
            previous = sequence
        return outputs

    def _learn(self, launch: _Launch) -> None:
        """Record a step's duration: from its launch, or the end of the previous step, to its
        result."""
        began_at = max(launch.launched_at, self._collected_at)
        self._collected_at = self._clock()
        duration_s = self._collected_at - began_at
        self._scheduler.learn(launch.plan.work, duration_s)
        self.step_times.add(duration_s)
        # The answers of sequences that have ended meanwhile are accounted for already.
        shares = (s for s in launch.plan.shares if s.sequence_id in self._sequences)
        self._charges = divided(duration_s, {s.sequence_id: s.num_tokens for s in shares})
        work = launch.plan.work
        num_tokens = work.num_prompt_tokens + work.num_decodes
        self._last_step = StepFacts(duration_s, len(launch.plan.shares), num_tokens)

    def _advance_prompt(self, sequence: Sequence, scores: list[TokenScore]) -> PromptScored:
        finish_reason = sequence.learn_scores(len(scores))
        if finish_reason is not None:
            self._end(sequence)
        return PromptScored(sequence.submit.sequence_id, scores, finish_reason)

    def _advance(
        self, sequence: Sequence, token_id: int, score: TokenScore | None, *, is_predicted: bool
    ) -> StepOutput:
        finish_reason = None
        try:
            finish_reason = sequence.append(token_id)
        except InvalidRequest as error:
            self._fail(sequence, error)
        if finish_reason is not None:
            self._end(sequence)
        elif not sequence.is_prepared and not sequence.num_pending:
            self._unprepared.append(sequence)
        return StepOutput(
            sequence.submit.sequence_id,
            token_id,
            finish_reason,
            sequence.num_cached or 0,
            score,
            is_predicted,
        )

    def _fail(self, sequence: Sequence, error: WarrenError) -> None:
        self._failed.append(SequenceFailed(sequence.submit.sequence_id, error))
        self._end(sequence)

    def _fail_not_finite(self, sequence: Sequence) -> None:
        self._fail(sequence, NotFinite("The model computed NaN or infinite numbers."))
        # Its keys and values may be such numbers, too.
        self._scheduler.forget(sequence)

    def _recover(self, failed: StepPlan) -> None:
        """End the sequence with the most tokens in the step, the last sequence of a tie; restart
        all others."""
        # Steps launched since depend on the failed step; later steps overwrite their results.
        self._in_flight = None
        shares = [share for share in failed.shares if share.sequence_id in self._sequences]
        if shares:
            largest = max(reversed(shares), key=attrgetter("num_tokens"))
            self._fail(self._sequences[largest.sequence_id], _out_of_memory())
        self._followers.clear()
        self._scheduler.restart(self._sequences.values())

    def _end(self, sequence: Sequence) -> None:
        sequence.is_ended = True
        self._scheduler.remove(sequence)
        del self._sequences[sequence.submit.sequence_id]
        self._release(sequence.submit.sequence_id)


def _out_of_memory() -> OutOfMemory:
    return OutOfMemory("The worker does not have enough memory for this request at present.")
