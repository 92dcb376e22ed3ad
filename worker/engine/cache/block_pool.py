"""The blocks of the KV cache: reference counts, the free list, and lookup by content."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple


class BlockCounts(NamedTuple):
    """The blocks of a pool by their content. Each block is counted once."""

    tokens: int
    """Keys and values of tokens of running sequences."""
    states: int
    """Recurrent states of running sequences."""
    cached_tokens: int
    """Keys and values that can be found, and are evicted if blocks are needed."""
    snapshots: int
    """The same for states."""
    empty: int


class BlockPool:
    """``num_blocks`` reference-counted blocks of ``block_size`` slots.

    A block is free when no sequence references it. Steps execute in launch order, so a block may be
    freed and reallocated while a step that reads it is still in flight.

    A named block can be found until its memory is reallocated: a free block keeps its content.
    Unnamed free blocks are allocated first, then named blocks in the order in which they were
    freed.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size} slots holds nothing")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._num_holders = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._free_named: OrderedDict[int, None] = OrderedDict()
        self._names: list[bytes | None] = [None] * num_blocks
        self._by_name: dict[bytes, int] = {}
        self._has_state = [False] * num_blocks
        self._num_states = 0
        """Blocks with states that are in use."""
        self._num_snapshots = 0
        """Blocks with states in the free list of named blocks."""

    @property
    def counts(self) -> BlockCounts:
        num_used = self.num_blocks - self.num_free
        return BlockCounts(
            tokens=num_used - self._num_states,
            states=self._num_states,
            cached_tokens=len(self._free_named) - self._num_snapshots,
            snapshots=self._num_snapshots,
            empty=len(self._free),
        )

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._free_named)

    def num_blocks_for(self, num_tokens: int) -> int:
        """The number of blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def num_holders(self, block: int) -> int:
        """The reference count of a block."""
        return self._num_holders[block]

    def name_of(self, block: int) -> bytes | None:
        """The name of a block, or None."""
        return self._names[block]

    def allocate(self, num_blocks: int, *, for_states: bool = False) -> list[int]:
        """Allocate free blocks, for tokens or for states. Raises `ValueError`, and allocates none,
        if there are too few."""
        if num_blocks > self.num_free:
            raise ValueError(f"{num_blocks} blocks requested, {self.num_free} free")
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(num_blocks)]
        for block in blocks:
            self._num_holders[block] = 1
            self._has_state[block] = for_states
        self._num_states += len(blocks) if for_states else 0
        return blocks

    def name(self, block: int, name: bytes) -> None:
        """Make a block in use findable by ``name``; of two blocks with the same name the first is
        found."""
        if name not in self._by_name:
            self._by_name[name] = block
            self._names[block] = name

    def find(self, name: bytes) -> int | None:
        """The block with this name, in use or free."""
        return self._by_name.get(name)

    def share(self, block: int) -> None:
        """Add a reference to a block that is in use, or that was found by name."""
        if self._num_holders[block] == 0:
            if self._names[block] is None:
                raise ValueError(f"block {block} is free and cannot be shared")
            del self._free_named[block]
            self._num_snapshots -= self._has_state[block]
            self._num_states += self._has_state[block]
        self._num_holders[block] += 1

    def free(self, block: int) -> None:
        """Drop a reference to a block; without references it becomes free."""
        if self._num_holders[block] == 0:
            raise ValueError(f"block {block} is free already")
        self._num_holders[block] -= 1
        if self._num_holders[block] == 0:
            self._num_states -= self._has_state[block]
            if self._names[block] is None:
                self._free.append(block)
            else:
                self._free_named[block] = None
                self._num_snapshots += self._has_state[block]

    def forget(self, name: bytes) -> None:
        """Remove a name, if a block has it."""
        block = self._by_name.pop(name, None)
        if block is not None:
            self._names[block] = None
            if self._num_holders[block] == 0:
                del self._free_named[block]
                self._free.append(block)
                self._num_snapshots -= self._has_state[block]

    def forget_names(self) -> None:
        """Remove all names, so that no block is found by its content."""
        self._free += self._free_named
        self._free_named.clear()
        self._num_snapshots = 0
        self._by_name.clear()
        self._names = [None] * self.num_blocks

    def _evict(self) -> int:
        """Evict the named block that was freed first."""
        block, _ = self._free_named.popitem(last=False)
        self._num_snapshots -= self._has_state[block]
        name = self._names[block]
        assert name is not None, f"block {block} is listed under a name that it does not have"
        del self._by_name[name]
        self._names[block] = None
        return block

    def check_invariants(self, block_tables: Iterable[Iterable[int]]) -> None:
        """Assert that references match these tables exactly, that all other blocks are free, and
        that names and blocks are consistent."""
        expected = [0] * self.num_blocks
        for block_table in block_tables:
            for block in block_table:
                expected[block] += 1
        assert self._num_holders == expected, (self._num_holders, expected)
        free = [block for block, num_holders in enumerate(expected) if num_holders == 0]
        assert sorted([*self._free, *self._free_named]) == free, (self._free, free)
        assert self._num_states == sum(
            has_state and num_holders > 0
            for has_state, num_holders in zip(self._has_state, expected, strict=True)
        )
        assert self._num_snapshots == sum(self._has_state[block] for block in self._free_named)
        named = {name: block for block, name in enumerate(self._names) if name is not None}
        assert self._by_name == named, (self._by_name, named)
        assert not any(self._names[block] for block in self._free)
        assert all(self._names[block] for block in self._free_named)
