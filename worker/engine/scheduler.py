"""Which sequences compute what in the next step, and who holds which blocks.

Sequences wait and run in one order: interactive before batch, then by arrival. The order decides
who is admitted first, and its end who is preempted first, so the oldest sequence always moves on.
A preempted sequence loses its blocks, keeps its place, and computes its tokens again.
"""

from bisect import insort
from dataclasses import dataclass, field
from operator import attrgetter

from shared.errors import StartupError
from worker.engine.block_pool import BlockPool
from worker.engine.interface import ScheduledSequence
from worker.engine.sequence import Sequence

HEADROOM_BLOCKS = 2
"""Free blocks that admission leaves for each running sequence to grow into.

On a mixed workload in tight memory 0, 1, 2 and 4 lead to 32, 7, 2 and 0 % of tokens computed again
and to batches of 20.2, 19.9, 19.5 and 18.1 sequences (tests/worker/engine/test_utilisation.py).
"""

_priority = attrgetter("priority")


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Raises `StartupError` where the limits contradict one another."""

    max_num_seqs: int
    """Sequences that run at once."""
    max_num_batched_tokens: int
    """Tokens of one step."""
    batch_reserve: int = 0
    """Places that batch sequences leave free for interactive ones; one can always run."""

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise StartupError(f"max_num_seqs is {self.max_num_seqs}; it must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise StartupError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; it must be at least "
                f"max_num_seqs, {self.max_num_seqs}: each running sequence has a token in a step"
            )

    def max_num_seqs_for(self, sequence: Sequence) -> int:
        """How many may run when this one is among them."""
        if sequence.is_batch:
            return max(1, self.max_num_seqs - self.batch_reserve)
        return self.max_num_seqs


@dataclass(slots=True)
class StepPlan:
    """One step as it grows: its sequences' shares, and whose the rows of its result are."""

    num_tokens_left: int
    block_size: int
    shares: list[ScheduledSequence] = field(default_factory=list)
    sampled: list[Sequence] = field(default_factory=list)

    def add(self, sequence: Sequence) -> None:
        """Compute as much of the sequence as the step still has room for."""
        num_tokens = min(sequence.num_uncomputed, self.num_tokens_left)
        share = sequence.take(num_tokens, len(self.sampled), self.block_size)
        self.num_tokens_left -= num_tokens
        self.shares.append(share)
        if share.is_sampled:
            self.sampled.append(sequence)


class Scheduler:
    """Owns the sequences that wait and run, and the pool."""

    def __init__(self, limits: SchedulerLimits, pool: BlockPool) -> None:
        self.num_preemptions = 0
        self._limits = limits
        self._pool = pool
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn. Its ``max_len`` must fit into the pool."""
        insort(self._waiting, sequence, key=_priority)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is, and free its blocks."""
        for sequences in (self._running, self._waiting):
            if sequence in sequences:
                sequences.remove(sequence)
        self._free_blocks(sequence)

    def schedule(self) -> StepPlan:
        """Plan the next step; it has no shares when there is nothing to compute.

        Every planned step must be launched: sequences count its tokens as computed.
        """
        plan = StepPlan(self._limits.max_num_batched_tokens, self._pool.block_size)
        self._yield_to_interactive()
        self._decode(plan)
        self._prefill(plan)
        self._admit(plan)
        self._retire(plan)
        return plan

    def _yield_to_interactive(self) -> None:
        """Preempt batch sequences if, and as far as, that lets the first interactive one in."""
        if not self._waiting or self._waiting[0].is_batch:
            return
        first = self._waiting[0]
        batch = [sequence for sequence in self._running if sequence.is_batch]
        num_freed = sum(len(sequence.block_table) for sequence in batch)
        if self._has_room(first, len(batch), num_freed):
            while not self._has_room(first):
                self._preempt_last()

    def _decode(self, plan: StepPlan) -> None:
        """One token for each sequence that lacks just one."""
        # Preemption shortens the list at its end, behind the sequence that is looked at.
        for sequence in self._running:
            if sequence.num_uncomputed == 1 and self._has_next_slot(sequence):
                plan.add(sequence)

    def _prefill(self, plan: StepPlan) -> None:
        """Go on with the prompt that an earlier step began.

        There is at most one: the next is begun with what a step has left after it.
        """
        for sequence in self._running:
            if sequence.num_uncomputed > 1:
                plan.add(sequence)

    def _admit(self, plan: StepPlan) -> None:
        """Begin with waiting sequences, strictly in order: none is passed by a smaller one."""
        while self._waiting and plan.num_tokens_left and self._has_room(self._waiting[0]):
            sequence = self._waiting.pop(0)
            insort(self._running, sequence, key=_priority)
            num_blocks = self._pool.num_blocks_for(sequence.num_tokens)
            sequence.block_table = self._pool.allocate(num_blocks)
            plan.add(sequence)

    def _retire(self, plan: StepPlan) -> None:
        """Sequences whose last token is under way need neither place nor blocks any more."""
        for sequence in plan.sampled:
            if sequence.is_complete:
                self.remove(sequence)

    def _has_room(self, sequence: Sequence, num_leaving: int = 0, num_freed: int = 0) -> bool:
        """Whether a waiting sequence may run, once ``num_leaving`` others have freed their blocks.

        It must fit with all tokens it has, and leave head-room for the others: else somebody would
        be preempted soon, and what was computed would be lost. So nobody is preempted and admitted
        in one step either.
        """
        num_others = len(self._running) - num_leaving
        num_wanted = self._pool.num_blocks_for(sequence.num_tokens) + HEADROOM_BLOCKS * num_others
        return (
            num_others < self._limits.max_num_seqs_for(sequence)
            and num_wanted <= self._pool.num_free + num_freed
        )

    def _has_next_slot(self, sequence: Sequence) -> bool:
        """Give the sequence a block for its next token; false if that took preempting itself."""
        if sequence.num_computed < len(sequence.block_table) * self._pool.block_size:
            return True
        while not self._pool.num_free:
            if self._preempt_last() is sequence:
                return False
        sequence.block_table += self._pool.allocate(1)
        return True

    def _preempt_last(self) -> Sequence:
        sequence = self._running.pop()
        self._free_blocks(sequence)
        sequence.num_computed = 0
        self.add(sequence)
        self.num_preemptions += 1
        return sequence

    def _free_blocks(self, sequence: Sequence) -> None:
        for block in sequence.block_table:
            self._pool.free(block)
        sequence.block_table = []

    def check_invariants(self) -> None:
        """Assert that no block is lost or held twice and that all is in order."""
        self._pool.check_invariants(sequence.block_table for sequence in self._running)
        for sequences in (self._running, self._waiting):
            assert sequences == sorted(sequences, key=_priority)
        for sequence in self._running:
            num_slots = len(sequence.block_table) * self._pool.block_size
            assert sequence.num_computed <= num_slots
        assert len(self._running) <= self._limits.max_num_seqs
        assert not any(sequence.is_ended for sequence in [*self._running, *self._waiting])
        assert not any(sequence.num_computed or sequence.block_table for sequence in self._waiting)
