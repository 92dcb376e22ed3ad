"""The KV cache's blocks: which are free, and how many sequences hold each of the others."""

from collections.abc import Iterable


class BlockPool:
    """``num_blocks`` blocks of ``block_size`` slots, counted by reference.

    A block is free when nobody holds it. Steps execute in the order of their launch, so a block may
    be freed and given away again while a step that reads it is still under way.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size} slots holds nothing")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._num_holders = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        """How many blocks it takes to hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take free blocks. Raises `ValueError`, and takes none, where there are fewer."""
        if num_blocks > len(self._free):
            raise ValueError(f"{num_blocks} blocks wanted, {len(self._free)} free")
        blocks = [self._free.pop() for _ in range(num_blocks)]
        for block in blocks:
            self._num_holders[block] = 1
        return blocks

    def share(self, block: int) -> None:
        """One more sequence holds a block that is in use."""
        if self._num_holders[block] == 0:
            raise ValueError(f"block {block} is free and cannot be shared")
        self._num_holders[block] += 1

    def free(self, block: int) -> None:
        """One sequence lets go of a block; with its last holder it becomes free."""
        if self._num_holders[block] == 0:
            raise ValueError(f"block {block} is free already")
        self._num_holders[block] -= 1
        if self._num_holders[block] == 0:
            self._free.append(block)

    def check_invariants(self, block_tables: Iterable[Iterable[int]]) -> None:
        """Assert that the holders are exactly these tables and that all other blocks are free."""
        expected = [0] * self.num_blocks
        for block_table in block_tables:
            for block in block_table:
                expected[block] += 1
        assert self._num_holders == expected, (self._num_holders, expected)
        free = [block for block, num_holders in enumerate(expected) if num_holders == 0]
        assert sorted(self._free) == free, (self._free, free)
