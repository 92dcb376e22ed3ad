"""The blocks of recurrent states of a group of layers."""

from collections.abc import Sequence

from worker.engine.cache.block_pool import BlockPool
from worker.engine.cache.layout import StateCache
from worker.engine.cache.token_blocks import BlockName


class StateGroup:
    """A group of layers that keep a recurrent state.

    A step reads a state from some blocks and writes the state after its tokens to others, or to the
    same blocks. A snapshot is therefore no copy: at a multiple of ``cache.every`` tokens the blocks
    that hold the state get a name, and the next step writes to new blocks. A step with drafts
    writes to new blocks, too: the state before it remains, in case that a draft is wrong.
    """

    grows = False

    def __init__(self, pool: BlockPool, cache: StateCache, tag: bytes) -> None:
        """``tag`` distinguishes the names of the group's blocks from the block names of other
        groups."""
        if cache.every % pool.block_size:
            raise ValueError(
                f"snapshots after every {cache.every} tokens, but blocks of {pool.block_size}"
            )
        self.pool = pool
        self.cache = cache
        self.every = cache.every
        self._tags = [tag + k.to_bytes(4, "little") for k in range(cache.num_blocks)]

    def num_blocks(self, num_tokens: int) -> int:
        """The maximum number of blocks that a sequence holds at a time: the blocks of the state
        that a step reads, and of the state that it writes."""
        return 2 * self.cache.num_blocks

    def longest(self, name: BlockName, num_tokens: int) -> int:
        """The length of the longest prefix, of up to ``num_tokens``, that has a snapshot."""
        num_tokens -= num_tokens % self.cache.every
        while num_tokens and not self.is_cached(name, num_tokens):
            num_tokens -= self.cache.every
        return num_tokens

    def found(self, name: BlockName, num_tokens: int) -> list[int]:
        """The blocks of the snapshot after so many tokens."""
        names = self.names(name, num_tokens) if num_tokens else []
        return [block for n in names if (block := self.pool.find(n)) is not None]

    def hold(self, name: BlockName, num_tokens: int) -> "StateBlocks":
        """Share the blocks of a snapshot."""
        found = self.found(name, num_tokens)
        for block in found:
            self.pool.share(block)
        return StateBlocks(self, found, num_tokens)

    def allocate(self) -> list[int]:
        """The blocks of a new state."""
        return self.pool.allocate(self.cache.num_blocks, for_states=True)

    def forget(self, name: bytes) -> None:
        """Make the snapshot at the end of a block impossible to find."""
        for tag in self._tags:
            self.pool.forget(name + tag)

    def is_cached(self, name: BlockName, num_tokens: int) -> bool:
        return all(self.pool.find(n) is not None for n in self.names(name, num_tokens))

    def names(self, name: BlockName, num_tokens: int) -> list[bytes]:
        """The names of the blocks of the snapshot after so many tokens."""
        prefix = name(num_tokens // self.pool.block_size - 1)
        return [prefix + tag for tag in self._tags]


class StateBlocks:
    """The blocks that a running sequence holds in a `StateGroup`."""

    def __init__(self, group: StateGroup, found: list[int], num_computed: int) -> None:
        self._group = group
        self._pool = group.pool
        self._read = found
        """The state that the next step reads; empty at the start of a sequence."""
        self._written: list[int] = []
        """Where the next step writes its state; the same list if it overwrites the old state."""
        self._num_read = num_computed
        """The number of tokens whose state is in ``_read``."""
        self._num_written = num_computed
        """The number of tokens, including drafts, after which the latest step wrote its state."""

    @property
    def blocks(self) -> Sequence[int]:
        return self._read if self._is_overwritten else [*self._read, *self._written]

    @property
    def num_covered(self) -> int:
        """0, because every step has to advance the state."""
        return 0

    @property
    def num_for_drafts(self) -> int:
        """The number of blocks that a step with drafts takes."""
        return self._group.cache.num_blocks if self._is_overwritten else 0

    def prepare_for_drafts(self) -> None:
        """Let the next step leave the state that it reads as it is."""
        if self._is_overwritten:
            self._written = self._group.allocate()

    def table(self, num_tokens: int) -> Sequence[int]:
        """The blocks that a step up to ``num_tokens`` reads, none at the start of a sequence, and
        the blocks that it writes."""
        self._num_written = num_tokens
        return [*self._read, *self._written]

    def advance(
        self, name: BlockName, num_computed: int, num_known: int, *, num_spare: int
    ) -> None:
        """Continue from the state that the last step wrote, unless one of its drafts was wrong.

        If a snapshot is due, and ``num_spare`` blocks suffice for another state, the state is
        published, and the next step writes elsewhere.
        """
        if num_computed == self._num_read or num_computed != self._num_written:
            return
        self._free_read()
        self._read, self._num_read = self._written, num_computed
        if num_spare >= self._group.cache.num_blocks and self._publish(name, num_known):
            self._written = self._group.allocate()

    def num_missing(self, num_tokens: int) -> int:
        return 0 if self._written else self._group.cache.num_blocks

    def grow(self, num_blocks: int) -> None:
        self._written += self._pool.allocate(num_blocks, for_states=True)

    def publish(self, name: BlockName, num_known: int) -> None:
        """Does nothing: a state that the next step may overwrite is not published."""

    def release(self, name: BlockName, num_computed: int, num_known: int) -> None:
        """Publish the state if a snapshot is due, and free all blocks."""
        self.advance(name, num_computed, num_known, num_spare=0)
        self._publish(name, num_known)
        self._free_read()
        for block in self._written:
            self._pool.free(block)

    def check_invariants(self, name: BlockName, num_computed: int) -> None:
        """Assert that a step can read a whole state and write a whole state, and overwrites no
        snapshot."""
        num_blocks = self._group.cache.num_blocks
        assert len(self._read) == (num_blocks if self._num_read else 0)
        assert len(self._written) == num_blocks
        assert self._num_read <= num_computed
        assert not any(self._pool.name_of(block) for block in self._written)

    @property
    def _is_overwritten(self) -> bool:
        return self._read is self._written

    def _publish(self, name: BlockName, num_known: int) -> bool:
        """Name the state that was read last, if a snapshot is due; returns whether it was named."""
        num_read = self._num_read
        is_due = 0 < num_read <= num_known and num_read % self._group.cache.every == 0
        if not is_due or self._group.is_cached(name, num_read):
            return False
        # Some blocks of an evicted snapshot may be left.
        self._group.forget(name(num_read // self._pool.block_size - 1))
        for block, block_name in zip(self._read, self._group.names(name, num_read), strict=True):
            self._pool.name(block, block_name)
        return True

    def _free_read(self) -> None:
        if not self._is_overwritten:
            for block in self._read:
                self._pool.free(block)
