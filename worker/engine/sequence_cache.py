"""The cache as the scheduler sees it: it asks for tokens, and never counts blocks."""

from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from hashlib import blake2b
from typing import NamedTuple

from worker.engine.cache.block_pool import BlockCounts, BlockPool
from worker.engine.cache.layout import CacheGroup, StateCache
from worker.engine.cache.state_blocks import StateGroup
from worker.engine.cache.token_blocks import BlockName, TokenGroup
from worker.engine.sequence import Sequence as TokenSequence

HEADROOM_BLOCKS = 2
"""Free blocks of each group that admission reserves for each running sequence to grow into.

On a mixed workload in tight memory, 0, 1, 2 and 4 lead to 32, 7, 2 and 0 % of tokens recomputed and
to batches of 20.2, 19.9, 19.5 and 18.1 sequences (tests/worker/engine/test_utilisation.py).
"""

_NAME_BYTES = 16
"""Long enough to rule out collisions, which would give wrong answers or leak another tenant's
prompt."""


class CachedPrefix(NamedTuple):
    """A prefix that all groups have."""

    num_tokens: int
    blocks: Sequence[int]
    """The blocks of all groups that a sequence needs to continue after it."""


class SequenceCache:
    """The blocks of all running sequences, in all groups of a model.

    Full blocks are named by their content, so that sequences with the same prefix share them. A
    block's name is a hash of the previous block's name and the block's own token ids, so it
    identifies all tokens up to the end of the block. The first block is hashed with the tenant, so
    that timing reveals nothing about other tenants' prompts. Each block of a sequence is hashed
    once.
    """

    def __init__(
        self,
        pool: BlockPool,
        groups: Iterable[CacheGroup],
        *,
        max_step_tokens: int,
        has_prefixes: bool,
    ) -> None:
        """``max_step_tokens`` is the maximum number of tokens in a step. Without ``has_prefixes``,
        sequences share nothing."""
        self._pool = pool
        self._has_prefixes = has_prefixes
        self._groups: list[TokenGroup | StateGroup] = []
        for k, cache in enumerate(groups):
            tag = k.to_bytes(2, "little")
            match cache:
                case StateCache():
                    self._groups.append(StateGroup(pool, cache, tag))
                case _:
                    self._groups.append(TokenGroup(pool, cache, max_step_tokens, tag))
        self.has_states = any(isinstance(group, StateGroup) for group in self._groups)
        """Whether a wrong draft takes a whole step back."""
        self._num_growing = sum(group.grows for group in self._groups)
        self._snapshots = [group.every for group in self._groups if group.every and has_prefixes]
        self._num_running = 0

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Including cached blocks, which can be evicted."""
        return self._pool.num_free

    @property
    def block_counts(self) -> BlockCounts:
        """The blocks by their content."""
        return self._pool.counts

    def num_blocks_for(self, num_tokens: int) -> int:
        """The maximum number of blocks that a sequence of so many tokens holds at a time."""
        return sum(group.num_blocks(num_tokens) for group in self._groups)

    def longest(self, max_tokens: int) -> int:
        """The length of the longest sequence, of up to ``max_tokens``, that fits alone."""
        return bisect_right(range(1, max_tokens + 1), self.num_blocks, key=self.num_blocks_for)

    def find(self, sequence: TokenSequence) -> CachedPrefix:
        """The longest prefix of a waiting sequence that all groups have; no references are taken.

        Covers at most ``num_cacheable`` tokens.
        """
        name, num_tokens = self._names(sequence), 0
        if self._has_prefixes:
            num_tokens = sequence.num_cacheable // self._pool.block_size * self._pool.block_size
            num_agreed = k = 0
            while num_tokens and num_agreed < len(self._groups):
                num_found = self._groups[k].longest(name, num_tokens)
                num_agreed = num_agreed + 1 if num_found == num_tokens else 1
                num_tokens = num_found
                k = (k + 1) % len(self._groups)
        blocks = [block for group in self._groups for block in group.found(name, num_tokens)]
        return CachedPrefix(num_tokens, blocks)

    def has_room(
        self, sequence: TokenSequence, num_others: int, leaving: Sequence[TokenSequence] = ()
    ) -> bool:
        """Whether a waiting sequence may run beside ``num_others`` once the sequences in
        ``leaving`` have freed their blocks.

        All of its tokens must fit, with headroom for the others: otherwise a sequence would soon be
        preempted and its computation lost.
        """
        num_wanted = self.num_blocks_for(sequence.num_tokens) + self._headroom(num_others)
        num_left = Counter(block for other in leaving for block in _blocks(other))
        num_free = self._pool.num_free + sum(
            self._pool.num_holders(block) == count for block, count in num_left.items()
        )
        # Blocks that other sequences keep in use need not be free; this check is slower.
        return num_wanted <= num_free or num_wanted <= num_free + sum(
            self._pool.num_holders(block) > num_left[block] for block in self.find(sequence).blocks
        )

    def begin(self, sequence: TokenSequence) -> None:
        """Give a waiting sequence, for which there is room, its blocks: the shared blocks of the
        cached prefix, whose tokens count as computed, and new blocks."""
        name, num_tokens = self._names(sequence), self.find(sequence).num_tokens
        sequence.num_computed = num_tokens
        sequence.held = [group.hold(name, num_tokens) for group in self._groups]
        sequence.has_states = self.has_states
        self._num_running += 1
        for held in sequence.held:
            held.grow(held.num_missing(sequence.num_tokens))
        sequence.num_covered = min(held.num_covered for held in sequence.held)

    def extend(self, sequence: TokenSequence, num_tokens: int) -> bool:
        """Prepare a running sequence for a step with tokens up to ``num_tokens``: publish and
        release the blocks behind it, and allocate blocks for the new tokens.

        Returns False, and allocates none, if too few blocks are free. That never happens within the
        prompt of a sequence.
        """
        if num_tokens <= sequence.num_covered:
            return True
        name, num_known = self._names(sequence), self._num_known(sequence)
        num_spare = self._pool.num_free - self._headroom(self._num_running)
        for held in sequence.held:
            held.advance(name, sequence.num_computed, num_known, num_spare=num_spare)
        missing = [held.num_missing(num_tokens) for held in sequence.held]
        if sum(missing) > self._pool.num_free:
            return False
        for held, num_missing in zip(sequence.held, missing, strict=True):
            held.grow(num_missing)
        sequence.num_covered = min(held.num_covered for held in sequence.held)
        return True

    def room_for_drafts(self, sequence: TokenSequence) -> int:
        """The number of tokens up to which a running sequence can be extended with drafts, without
        the blocks that are reserved for others, and no further than to its next snapshot. A state
        before the drafts takes blocks, too."""
        num_spare = self._pool.num_free - self._headroom(self._num_running)
        num_spare -= sum(held.num_for_drafts for held in sequence.held)
        if num_spare < 0:
            return 0
        ends = [
            held.num_covered + num_spare // self._num_growing * self._pool.block_size
            for held, group in zip(sequence.held, self._groups, strict=True)
            if group.grows
        ]
        if (most := self.num_until_snapshot(sequence.num_computed)) is not None:
            ends.append(sequence.num_computed + most)
        return min(ends, default=sequence.max_len)

    def extend_for_drafts(self, sequence: TokenSequence, num_tokens: int) -> None:
        """Prepare a running sequence, for which there is room, for a step with drafts up to
        ``num_tokens``."""
        self.extend(sequence, num_tokens)
        for held in sequence.held:
            held.prepare_for_drafts()

    def num_until_snapshot(self, start: int) -> int | None:
        """The maximum number of tokens from ``start`` on in a step: it ends where the next snapshot
        is due. None if no snapshot is due."""
        return min((every - start % every for every in self._snapshots), default=None)

    def tables(self, sequence: TokenSequence, num_tokens: int) -> list[Sequence[int]]:
        """The blocks of each group for a step with tokens up to ``num_tokens``; see
        `ScheduledSequence.block_tables`."""
        return [held.table(num_tokens) for held in sequence.held]

    def publish(self, sequence: TokenSequence) -> None:
        """Make blocks findable that launched steps have filled with known tokens.

        Tokens of a sequence's last step are unknown when its blocks are freed, so the block that
        they fill is not cached.
        """
        name, num_known = self._names(sequence), self._num_known(sequence)
        for held in sequence.held:
            held.publish(name, num_known)

    def release(self, sequence: TokenSequence) -> None:
        """Publish and free all blocks of a sequence, if it has any. Nothing of it counts as
        computed any more."""
        if sequence.held:
            name, num_known = self._names(sequence), self._num_known(sequence)
            for held in sequence.held:
                held.release(name, sequence.num_computed, num_known)
            self._num_running -= 1
        sequence.held = []
        sequence.num_covered = sequence.num_computed = sequence.num_redone = 0

    def discard(self, sequences: Iterable[TokenSequence]) -> None:
        """Free the blocks of ``sequences``, which must be all that run. Nothing that was computed
        can be found any more."""
        for sequence in sequences:
            for block in _blocks(sequence):
                self._pool.free(block)
            sequence.held = []
        self._num_running = 0
        self._pool.forget_names()

    def forget(self, sequence: TokenSequence) -> None:
        """Make the blocks of a sequence impossible to find, including blocks that it found itself.
        Sequences that use them keep them."""
        for name in sequence.block_names:
            for group in self._groups:
                group.forget(name)

    def check_invariants(self, running: Sequence[TokenSequence]) -> None:
        """Assert that no block is lost or held twice, that blocks are named only once all their
        tokens are known, and that each sequence can continue."""
        self._pool.check_invariants(map(_blocks, running))
        assert len(running) == self._num_running
        for sequence in running:
            num_named = len(sequence.block_names) * self._pool.block_size
            assert num_named <= len(sequence.token_ids)
            for held in sequence.held:
                held.check_invariants(self._names(sequence), sequence.num_computed)

    def _headroom(self, num_running: int) -> int:
        return HEADROOM_BLOCKS * self._num_growing * num_running

    def _num_known(self, sequence: TokenSequence) -> int:
        """The number of computed tokens that are known; 0 if sequences share nothing."""
        if not self._has_prefixes:
            return 0
        return min(sequence.num_computed, len(sequence.token_ids))

    def _names(self, sequence: TokenSequence) -> BlockName:
        return partial(_name, sequence, self._pool.block_size)


def _blocks(sequence: TokenSequence) -> list[int]:
    """The blocks that a sequence holds in all groups."""
    return [block for held in sequence.held for block in held.blocks]


def _name(sequence: TokenSequence, block_size: int, k: int) -> bytes:
    names = sequence.block_names
    while len(names) <= k:
        parent = names[-1] if names else _tenant_name(sequence.submit.tenant)
        start = len(names) * block_size
        token_ids = array("I", sequence.token_ids[start : start + block_size])
        names.append(blake2b(parent + token_ids.tobytes(), digest_size=_NAME_BYTES).digest())
    return names[k]


def _tenant_name(tenant: str) -> bytes:
    # A separate hash space, so that no tenant name can collide with a block's name.
    return blake2b(tenant.encode(), digest_size=_NAME_BYTES, person=b"tenant").digest()
