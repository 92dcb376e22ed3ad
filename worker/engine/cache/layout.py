"""The kinds of groups that the layers of a model form, by what a layer keeps of a sequence.

The layers of a group need the same tokens, so a group has a block table for each sequence. All
groups take their blocks from the same pool, in which every block has the same size in bytes, so
nobody has to guess how much memory each group will need.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class FullCache:
    """Keys and values of all tokens of a sequence."""

    @property
    def num_read(self) -> int | None:
        """The maximum number of tokens before its own that a token reads; None if it reads all."""
        return None

    def first_read(self, position: int) -> int:
        """The first token that the token at ``position`` reads."""
        return 0


@dataclass(frozen=True, slots=True)
class LatentCache(FullCache):
    """As `FullCache`, with a latent vector of each token in place of keys and values."""


@dataclass(frozen=True, slots=True)
class WindowCache:
    """Keys and values of the last ``num_tokens`` tokens, including the token that reads them."""

    num_tokens: int

    def __post_init__(self) -> None:
        _check_length(self.num_tokens)

    @property
    def num_read(self) -> int | None:
        return self.num_tokens - 1

    def first_read(self, position: int) -> int:
        return max(0, position + 1 - self.num_tokens)


@dataclass(frozen=True, slots=True)
class ChunkCache:
    """Keys and values of a chunk: ``num_tokens`` tokens from a multiple of that number on."""

    num_tokens: int

    def __post_init__(self) -> None:
        _check_length(self.num_tokens)

    @property
    def num_read(self) -> int | None:
        return self.num_tokens - 1

    def first_read(self, position: int) -> int:
        return position - position % self.num_tokens


@dataclass(frozen=True, slots=True)
class StateCache:
    """A recurrent state, which replaces all tokens before it."""

    num_blocks: int
    """The number of blocks of a state."""
    every: int
    """A snapshot of the state is kept after every so many tokens: a multiple of the block size."""

    def __post_init__(self) -> None:
        _check_length(self.num_blocks)
        _check_length(self.every)


TokenCache: TypeAlias = FullCache | WindowCache | ChunkCache
CacheGroup: TypeAlias = TokenCache | StateCache

ONE_FULL: Sequence[CacheGroup] = (FullCache(),)
"""The groups of a model in which every layer attends to all tokens."""


def _check_length(length: int) -> None:
    if length < 1:
        raise ValueError(f"a cache of {length} tokens or blocks holds nothing")
