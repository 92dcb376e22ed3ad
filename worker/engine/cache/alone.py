"""The blocks of a sequence that has the cache to itself."""

from collections.abc import Sequence

from worker.engine.cache.layout import CacheGroup, StateCache


class BlocksAlone:
    """The block tables of a sequence to which no scheduler gives blocks: its tokens keep theirs,
    and its states are overwritten."""

    def __init__(self, groups: Sequence[CacheGroup], block_size: int, num_tokens: int) -> None:
        """``num_tokens`` is the length of the whole sequence."""
        self._groups = groups
        self._block_size = block_size
        self._tables: list[range] = []
        self.num_blocks = 0
        """The number of blocks from 0 on that the sequence has."""
        for group in groups:
            first = self.num_blocks
            if isinstance(group, StateCache):
                self.num_blocks += group.num_blocks
            else:
                self.num_blocks += self._num_blocks_for(num_tokens)
            self._tables.append(range(first, self.num_blocks))

    def of_step(self, start: int, end: int) -> list[Sequence[int]]:
        """The tables of a step that computes the tokens from ``start`` to ``end``."""
        return [
            [*(table if start else ()), *table]
            if isinstance(group, StateCache)
            else table[: self._num_blocks_for(end)]
            for group, table in zip(self._groups, self._tables, strict=True)
        ]

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
