"""Builders for engine tests: submits, small engines, and the streams they must yield."""

import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from msgspec import structs

from shared.messages import FinishReason, JobClass, SamplingParams
from worker.engine.cache.layout import ONE_FULL, CacheGroup
from worker.engine.engine import Engine
from worker.engine.interface import (
    EngineCommand,
    LogitEdits,
    Output,
    PromptScored,
    ScheduledBatch,
    SequenceId,
    StepHandle,
    StepOutput,
    Submit,
    TokenConstraint,
    TokenPenalties,
)
from worker.engine.scheduler import SchedulerLimits
from worker.model.echo import EchoRunner, next_score, next_token

VOCAB_SIZE = 64


class RecordingRunner(EchoRunner):
    """Records the batches that were launched."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab_size: int = VOCAB_SIZE,
        groups: Sequence[CacheGroup] = ONE_FULL,
    ) -> None:
        super().__init__(
            num_blocks=num_blocks,
            block_size=block_size,
            groups=groups,
            vocab_size=vocab_size,
            is_thorough=True,
        )
        self.batches: list[ScheduledBatch] = []

    def launch(self, batch: ScheduledBatch) -> StepHandle:
        self.batches.append(batch)
        return super().launch(batch)


class DeviceLost(Exception):
    """The error of a `BreakingRunner`."""


class BreakingRunner(EchoRunner):
    """Computes some steps, then raises."""

    def __init__(self, num_good_steps: int) -> None:
        super().__init__(num_blocks=64, block_size=4, vocab_size=VOCAB_SIZE)
        self._num_steps_left = num_good_steps

    def launch(self, batch: ScheduledBatch) -> StepHandle:
        if self._num_steps_left == 0:
            raise DeviceLost
        self._num_steps_left -= 1
        return super().launch(batch)


class SmallEngine(Engine):
    """An engine with an echo runner, which checks its invariants after every step."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        batch_reserve: int = 0,
        prefix_cache: bool = False,
        vocab_size: int = VOCAB_SIZE,
        groups: Sequence[CacheGroup] = ONE_FULL,
        max_draft_tokens: int = 0,
        prediction_cost: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runner = RecordingRunner(num_blocks, block_size, vocab_size, groups)
        limits = SchedulerLimits(
            max_num_seqs,
            max_num_batched_tokens,
            batch_reserve,
            prefix_cache=prefix_cache,
            max_draft_tokens=max_draft_tokens,
            prediction_cost=prediction_cost,
        )
        self.scored: list[PromptScored] = []
        super().__init__(self.runner, limits, clock)

    def step(self, commands: Iterable[EngineCommand] = ()) -> list[StepOutput]:
        """Return the tokens of a step, and append the scores of prompts to ``scored``."""
        outputs = super().step(commands)
        self.check_invariants()
        self.scored += [output for output in outputs if isinstance(output, PromptScored)]
        return [output for output in outputs if isinstance(output, StepOutput)]

    def run(self, *commands: EngineCommand, max_num_steps: int = 1000) -> list[StepOutput]:
        """Step until there is no more work."""
        outputs = self.step(commands)
        for _ in range(max_num_steps):
            if not self.has_work:
                return outputs
            outputs += self.step()
        raise AssertionError(f"still at work after {max_num_steps} steps")

    @property
    def num_tokens_by_step(self) -> list[list[int]]:
        """For each launched step, the number of tokens that it computed of each sequence."""
        return [[share.num_tokens for share in batch.sequences] for batch in self.runner.batches]


def new_submit(
    name: str = "a",
    num_prompt: int = 5,
    max_tokens: int = 6,
    *,
    prompt_ids: Sequence[int] | None = None,
    output_ids: Sequence[int] = (),
    eos_ids: frozenset[int] = frozenset(),
    ignore_eos: bool = False,
    seed: int = 7,
    choice: int = 0,
    job_class: JobClass = "interactive",
    tenant: str = "",
    sampling: SamplingParams | None = None,
    leader: SequenceId | None = None,
    scores_prompt: bool = False,
    bad_words: Sequence[Sequence[int]] = (),
    allowed: bytes | None = None,
    constraint: TokenConstraint | None = None,
) -> Submit:
    """A submit whose prompt is a function of its id."""
    if prompt_ids is None:
        prompt_ids = [(sum(name.encode()) + 7 * k) % VOCAB_SIZE for k in range(num_prompt)]
    return Submit(
        sequence_id=SequenceId(name, choice),
        prompt_ids=prompt_ids,
        sampling=sampling or SamplingParams(ignore_eos=ignore_eos),
        seed=seed,
        max_tokens=max_tokens,
        eos_ids=eos_ids,
        output_ids=output_ids,
        job_class=job_class,
        tenant=tenant,
        leader=leader,
        scores_prompt=scores_prompt,
        bad_words=bad_words,
        allowed=allowed,
        constraint=constraint,
    )


def expected_outputs(submit: Submit, vocab_size: int = VOCAB_SIZE) -> list[StepOutput]:
    """The tokens of a sequence without any disturbance, computed without an engine."""
    token_ids = [*submit.prompt_ids, *submit.output_ids]
    outputs: list[StepOutput] = []
    depth = submit.sampling.logprobs
    for position in range(len(submit.output_ids), submit.max_tokens):
        choice = submit.sequence_id.choice
        edits = naive_edits(submit, token_ids[len(submit.prompt_ids) :])
        token_id = next_token(token_ids, submit.seed, choice, position, vocab_size, edits)
        score = None if depth is None else next_score(token_ids, token_id, depth, vocab_size)
        token_ids.append(token_id)
        reason = _finish_reason(submit, token_id, position)
        outputs.append(StepOutput(submit.sequence_id, token_id, reason, score=score))
        if reason is not None:
            break
    return outputs


def naive_edits(submit: Submit, output_ids: Sequence[int]) -> LogitEdits | None:
    """The edits for the draw after ``output_ids``, computed from all tokens each time."""
    sampling = submit.sampling
    is_penalized = (
        sampling.repetition_penalty != 1
        or sampling.presence_penalty != 0
        or sampling.frequency_penalty != 0
    )
    banned_ids = [
        word[-1]
        for word in submit.bad_words
        if list(word[:-1]) == list(output_ids)[len(output_ids) + 1 - len(word) :]
        and len(output_ids) >= len(word) - 1
    ]
    if len(output_ids) < sampling.min_tokens:
        banned_ids += [*submit.eos_ids, *sampling.stop_token_ids]
    mask = submit.allowed
    if mask is not None:
        mask = mask_of({k for k in ids_of(mask) if k not in banned_ids})
        banned_ids = []
    if not (is_penalized or banned_ids or sampling.logit_bias or mask is not None):
        return None
    penalties = _naive_penalties(submit, output_ids) if is_penalized else None
    return LogitEdits(sampling.logit_bias, penalties, banned_ids, mask)


def mask_of(token_ids: Iterable[int]) -> bytes:
    bits = sum(1 << token_id for token_id in set(token_ids))
    return bits.to_bytes(-(-VOCAB_SIZE // 32) * 4, "little")


def ids_of(mask: bytes) -> set[int]:
    return {k for k in range(8 * len(mask)) if mask[k // 8] >> k % 8 & 1}


def _naive_penalties(submit: Submit, output_ids: Sequence[int]) -> TokenPenalties:
    sampling = submit.sampling
    repeated = submit.prompt_ids if sampling.repetition_penalty != 1 else ()
    seen = list(dict.fromkeys([*repeated, *output_ids]))
    counts = [list(output_ids).count(token_id) for token_id in seen]
    subtracted = [
        sampling.presence_penalty + sampling.frequency_penalty * count if count else 0.0
        for count in counts
    ]
    return TokenPenalties(array("q", seen), array("f", subtracted), sampling.repetition_penalty)


def by_sequence(outputs: Iterable[Output]) -> dict[SequenceId, list[StepOutput]]:
    """The tokens of each sequence."""
    streams: defaultdict[SequenceId, list[StepOutput]] = defaultdict(list)
    for output in outputs:
        if isinstance(output, StepOutput):
            streams[output.sequence_id].append(output)
    return dict(streams)


def undrafted(outputs: Iterable[StepOutput]) -> list[StepOutput]:
    """The tokens without the note that drafts predicted them."""
    return [structs.replace(output, is_predicted=False) for output in outputs]


def _finish_reason(submit: Submit, token_id: int, position: int) -> FinishReason | None:
    reason: Literal["stop", "length"] | None = None
    if position == submit.max_tokens - 1:
        reason = "length"
    if token_id in submit.eos_ids and not submit.sampling.ignore_eos:
        reason = "stop"
    if token_id in submit.sampling.stop_token_ids:
        reason = "stop"
    return reason
