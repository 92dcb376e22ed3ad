"""The share of held memory that is in use, and the cost of tight memory."""

import random
from dataclasses import dataclass

from tests.support.models.engine import new_submit
from worker.engine.cache.block_pool import BlockPool
from worker.engine.cache.layout import ONE_FULL
from worker.engine.interface import Submit
from worker.engine.scheduler import Scheduler, SchedulerLimits
from worker.engine.sequence import Sequence
from worker.engine.sequence_cache import SequenceCache

BLOCK_SIZE = 16


def mixed_workload(num_seqs: int) -> list[Submit]:
    """Prompts of 220 and outputs of 200 tokens on average, from 1 to many times that."""
    rng = random.Random(220)
    return [
        new_submit(
            num_prompt=1 + min(2000, int(rng.expovariate(1 / 219))),
            max_tokens=1 + min(2000, int(rng.expovariate(1 / 199))),
        )
        for _ in range(num_seqs)
    ]


@dataclass
class Usage:
    """Summed over the steps of a run."""

    num_slots_held: int = 0
    num_slots_used: int = 0
    num_tokens: int = 0

    @property
    def unused(self) -> float:
        return 1 - self.num_slots_used / self.num_slots_held


def run(submits: list[Submit], num_blocks: int) -> Usage:
    """Schedule a whole workload; every drawn token is 0."""
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    limits = SchedulerLimits(max_num_seqs=64, max_num_batched_tokens=512, prefix_cache=False)
    cache = SequenceCache(pool, ONE_FULL, max_step_tokens=512, has_prefixes=False)
    scheduler = Scheduler(limits, cache)
    sequences = [Sequence(submit, arrival) for arrival, submit in enumerate(submits)]
    for sequence in sequences:
        scheduler.add(sequence)
    usage = Usage()
    while (plan := scheduler.schedule(has_time=lambda: True)).shares:
        usage.num_tokens += sum(share.num_tokens for share in plan.shares)
        usage.num_slots_held += BLOCK_SIZE * (pool.num_blocks - pool.num_free)
        usage.num_slots_used += sum(sequence.num_computed for sequence in sequences)
        for sequence in plan.sampled:
            if sequence.append(0) is not None:
                scheduler.remove(sequence)
    return usage


def test_hardly_any_allocated_slot_is_unused() -> None:
    usage = run(mixed_workload(200), num_blocks=4096)

    print(f"allocated but unused: {usage.unused:.2%} of slots")
    assert usage.unused < 0.04


def test_hardly_any_token_is_computed_twice_in_tight_memory() -> None:
    """There is memory for a third of the sequences that may run."""
    submits = mixed_workload(300)
    num_tokens = sum(len(submit.prompt_ids) + submit.max_tokens - 1 for submit in submits)

    usage = run(submits, num_blocks=600)

    recomputed = usage.num_tokens / num_tokens - 1
    print(f"computed again: {recomputed:.2%} of tokens, unused: {usage.unused:.2%} of slots")
    assert 0 < recomputed < 0.05
    assert usage.unused < 0.04
