"""Builders for the batches that a scheduler passes to a runner."""

from collections.abc import Sequence

from shared.messages import SamplingParams
from worker.engine.interface import LogitEdits, ScheduledBatch, ScheduledSequence, SequenceId

GREEDY = SamplingParams(temperature=0.0)


def share(
    token_ids: Sequence[int],
    blocks: Sequence[int],
    *,
    start: int = 0,
    is_sampled: bool = True,
    sampling: SamplingParams = GREEDY,
    seed: int = 0,
    choice: int = 0,
    position: int = 0,
    num_drafts: int = 0,
    previous_row: int | None = None,
    edits: LogitEdits | None = None,
    scored_start: int = 0,
    scored_ids: Sequence[int] = (),
    states: Sequence[int] = (),
    next_id: int | None = None,
    is_predicted: bool = False,
) -> ScheduledSequence:
    """A sequence's share of a step; ``states`` are the blocks of its states, if the model has
    any. With states and without ``blocks``, the model keeps nothing else."""
    return ScheduledSequence(
        sequence_id=SequenceId("request", choice),
        start=start,
        token_ids=token_ids,
        block_tables=[table for table in (blocks, states) if table] or [blocks],
        is_sampled=is_sampled,
        sampling=sampling,
        seed=seed,
        position=position,
        num_drafts=num_drafts,
        previous_row=previous_row,
        edits=edits,
        scored_start=scored_start,
        scored_ids=scored_ids,
        next_id=next_id,
        is_predicted=is_predicted,
    )


def batch(*shares: ScheduledSequence) -> ScheduledBatch:
    return ScheduledBatch(shares)
