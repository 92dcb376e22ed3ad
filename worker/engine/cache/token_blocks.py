"""The blocks of keys and values of a group of layers."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from worker.engine.cache.block_pool import BlockPool
from worker.engine.cache.layout import TokenCache

RELEASED = -1
"""Stands in a block table for a block that no later token reads."""

BlockName: TypeAlias = Callable[[int], bytes]
"""Returns the name of a block of a sequence: it identifies all tokens up to the block's end."""


class TokenGroup:
    """A group of layers that read the keys and values of earlier tokens."""

    grows = True
    every: int | None = None

    def __init__(
        self, pool: BlockPool, cache: TokenCache, max_step_tokens: int, tag: bytes
    ) -> None:
        """``tag`` distinguishes the names of the group's blocks from the block names of other
        groups. ``max_step_tokens`` is the maximum number of tokens of a step."""
        self.pool = pool
        self.cache = cache
        self.tag = tag
        self.max_held: int | None = None
        """The maximum number of blocks that a sequence holds; None: all."""
        if cache.num_read is not None:
            # As many neighbouring tokens lie in up to so many blocks.
            num_tokens = cache.num_read + max_step_tokens
            self.max_held = 1 + pool.num_blocks_for(num_tokens - 1)

    def num_blocks(self, num_tokens: int) -> int:
        """The maximum number of blocks that a sequence of so many tokens holds at a time."""
        num_blocks = self.pool.num_blocks_for(num_tokens)
        return num_blocks if self.max_held is None else min(num_blocks, self.max_held)

    def longest(self, name: BlockName, num_tokens: int) -> int:
        """The length of the longest prefix, of up to ``num_tokens``, after which a sequence can
        continue with cached blocks only."""
        end = num_tokens // self.pool.block_size
        if self.cache.num_read is None:
            num_cached = next((k for k in range(end) if not self._is_cached(name, k)), end)
            return num_cached * self.pool.block_size
        while end:
            needed = range(self._first_needed(end), end)
            missing = next((k for k in reversed(needed) if not self._is_cached(name, k)), None)
            if missing is None:
                break
            end = missing
        return end * self.pool.block_size

    def found(self, name: BlockName, num_tokens: int) -> list[int]:
        """The cached blocks that a sequence needs to continue after such a prefix."""
        end = num_tokens // self.pool.block_size
        names = (name(k) + self.tag for k in range(self._first_needed(end), end))
        return [block for n in names if (block := self.pool.find(n)) is not None]

    def hold(self, name: BlockName, num_tokens: int) -> "TokenBlocks":
        """Share the blocks of a cached prefix."""
        found = self.found(name, num_tokens)
        for block in found:
            self.pool.share(block)
        first = num_tokens // self.pool.block_size - len(found)
        return TokenBlocks(self, first, found)

    def forget(self, name: bytes) -> None:
        """Make a block impossible to find."""
        self.pool.forget(name + self.tag)

    def _first_needed(self, end: int) -> int:
        """The first block that is read by the tokens behind the first ``end`` blocks."""
        block_size = self.pool.block_size
        return min(end, self.cache.first_read(end * block_size) // block_size)

    def _is_cached(self, name: BlockName, k: int) -> bool:
        return self.pool.find(name(k) + self.tag) is not None


class TokenBlocks:
    """The blocks that a running sequence holds in a `TokenGroup`."""

    def __init__(self, group: TokenGroup, first: int, found: Sequence[int]) -> None:
        self._group = group
        self._pool = group.pool
        self._block_size = group.pool.block_size
        self._table = [RELEASED] * first + [*found]
        self._first = first
        """Blocks before this index have been released."""
        self._num_published = len(self._table)

    @property
    def blocks(self) -> Sequence[int]:
        return self._table[self._first :]

    @property
    def num_covered(self) -> int:
        """The number of tokens from the start that have or had a block."""
        return len(self._table) * self._pool.block_size

    @property
    def num_for_drafts(self) -> int:
        """0, because the next tokens overwrite wrong drafts."""
        return 0

    def prepare_for_drafts(self) -> None:
        """Does nothing."""

    def table(self, num_tokens: int) -> Sequence[int]:
        """The block table of so many tokens."""
        # As `num_blocks_for`, without a call for every sequence in every step.
        return self._table[: -(-num_tokens // self._block_size)]

    def advance(
        self, name: BlockName, num_computed: int, num_known: int, *, num_spare: int
    ) -> None:
        """Publish full blocks, and release the blocks that the next tokens do not read."""
        self.publish(name, num_known)
        first = self._group.cache.first_read(num_computed) // self._pool.block_size
        for k in range(self._first, first):
            self._pool.free(self._table[k])
            self._table[k] = RELEASED
        self._first = max(self._first, first)

    def num_missing(self, num_tokens: int) -> int:
        """The number of blocks to allocate for a sequence of so many tokens, as far as it may hold
        them at a time.

        A prompt in chunks gets as many blocks as it released, so that it never waits for more.
        """
        end = self._pool.num_blocks_for(num_tokens)
        if self._group.max_held is not None:
            end = min(end, self._first + self._group.max_held)
        return max(0, end - len(self._table))

    def grow(self, num_blocks: int) -> None:
        self._table += self._pool.allocate(num_blocks)

    def publish(self, name: BlockName, num_known: int) -> None:
        """Make the blocks findable that launched steps have filled with known tokens."""
        num_full = num_known // self._pool.block_size
        for k in range(max(self._num_published, self._first), num_full):
            self._pool.name(self._table[k], name(k) + self._group.tag)
        self._num_published = num_full

    def release(self, name: BlockName, num_computed: int, num_known: int) -> None:
        """Publish and free all blocks."""
        self.publish(name, num_known)
        # Freed from the end, so that common prefixes are evicted last.
        for block in reversed(self.blocks):
            self._pool.free(block)

    def check_invariants(self, name: BlockName, num_computed: int) -> None:
        """Assert that all blocks that the next token reads are there, that no others are, and that
        published blocks have the names of their tokens."""
        assert num_computed <= self.num_covered
        first_read = self._group.cache.first_read(num_computed)
        assert self._first <= first_read // self._pool.block_size
        assert all(block == RELEASED for block in self._table[: self._first])
        assert RELEASED not in self.blocks
        assert self._group.max_held is None or len(self.blocks) <= self._group.max_held
        for k in range(self._first, self._num_published):
            names = (None, name(k) + self._group.tag)
            assert self._pool.name_of(self._table[k]) in names
