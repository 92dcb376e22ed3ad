"""Builders for engine tests: submits, small engines, and the streams they must yield."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal

from shared.messages import FinishReason, JobClass, SamplingParams
from worker.engine.engine import Command, Engine
from worker.engine.interface import ScheduledBatch, SequenceId, StepHandle, StepOutput, Submit
from worker.engine.scheduler import SchedulerLimits
from worker.model.echo import EchoRunner, next_token

VOCAB_SIZE = 64


class RecordingRunner(EchoRunner):
    """Keeps the batches that were launched."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(
            num_blocks=num_blocks, block_size=block_size, vocab_size=VOCAB_SIZE, is_thorough=True
        )
        self.batches: list[ScheduledBatch] = []

    def launch(self, batch: ScheduledBatch) -> StepHandle:
        self.batches.append(batch)
        return super().launch(batch)


class DeviceLost(Exception):
    """What a `BreakingRunner` dies of."""


class BreakingRunner(EchoRunner):
    """Computes some steps and breaks."""

    def __init__(self, num_good_steps: int) -> None:
        super().__init__(num_blocks=64, block_size=4, vocab_size=VOCAB_SIZE)
        self._num_steps_left = num_good_steps

    def launch(self, batch: ScheduledBatch) -> StepHandle:
        if self._num_steps_left == 0:
            raise DeviceLost
        self._num_steps_left -= 1
        return super().launch(batch)


class SmallEngine(Engine):
    """An engine over a thorough echo runner that checks its invariants after every step."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        batch_reserve: int = 0,
        prefix_cache: bool = False,
    ) -> None:
        self.runner = RecordingRunner(num_blocks, block_size)
        limits = SchedulerLimits(
            max_num_seqs, max_num_batched_tokens, batch_reserve, prefix_cache=prefix_cache
        )
        super().__init__(self.runner, limits)

    def step(self, commands: Iterable[Command] = ()) -> list[StepOutput]:
        outputs = super().step(commands)
        self.check_invariants()
        return outputs

    def run(self, *commands: Command, max_num_steps: int = 1000) -> list[StepOutput]:
        """Step until all is done."""
        outputs = self.step(commands)
        for _ in range(max_num_steps):
            if not self.has_work:
                return outputs
            outputs += self.step()
        raise AssertionError(f"still at work after {max_num_steps} steps")

    @property
    def num_tokens_by_step(self) -> list[list[int]]:
        """For each launched step, how many tokens of each of its sequences it computed."""
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
) -> Submit:
    """A submit whose prompt is a function of its name."""
    if prompt_ids is None:
        prompt_ids = [(sum(name.encode()) + 7 * k) % VOCAB_SIZE for k in range(num_prompt)]
    return Submit(
        sequence_id=SequenceId(name, choice),
        prompt_ids=prompt_ids,
        sampling=SamplingParams(ignore_eos=ignore_eos),
        seed=seed,
        max_tokens=max_tokens,
        eos_ids=eos_ids,
        output_ids=output_ids,
        job_class=job_class,
        tenant=tenant,
    )


def expected_outputs(submit: Submit) -> list[StepOutput]:
    """What the sequence yields when nothing disturbs it, computed without any engine."""
    token_ids = [*submit.prompt_ids, *submit.output_ids]
    outputs: list[StepOutput] = []
    for position in range(len(submit.output_ids), submit.max_tokens):
        choice = submit.sequence_id.choice
        token_id = next_token(token_ids, submit.seed, choice, position, VOCAB_SIZE)
        token_ids.append(token_id)
        reason = _finish_reason(submit, token_id, position)
        outputs.append(StepOutput(submit.sequence_id, token_id, reason))
        if reason is not None:
            break
    return outputs


def by_sequence(outputs: Iterable[StepOutput]) -> dict[SequenceId, list[StepOutput]]:
    streams: defaultdict[SequenceId, list[StepOutput]] = defaultdict(list)
    for output in outputs:
        streams[output.sequence_id].append(output)
    return dict(streams)


def _finish_reason(submit: Submit, token_id: int, position: int) -> FinishReason | None:
    reason: Literal["stop", "length"] | None = None
    if position == submit.max_tokens - 1:
        reason = "length"
    if token_id in submit.eos_ids and not submit.sampling.ignore_eos:
        reason = "stop"
    return reason
