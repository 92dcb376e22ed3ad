"""The tokens of one choice, as readers and writers of its log keep them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

EMPTY_HASH = 0xCBF29CE484222325
_HASH_PRIME = 0x100000001B3
_HASH_MASK = (1 << 64) - 1


def extend_hash(prefix_hash: int, token_ids: Iterable[int]) -> int:
    """FNV-1a over whole token ids, 64 bits; `EMPTY_HASH` stands for no tokens."""
    for token_id in token_ids:
        prefix_hash = ((prefix_hash ^ token_id) * _HASH_PRIME) & _HASH_MASK
    return prefix_hash


@dataclass(slots=True)
class TokenChain:
    """The token ids of one choice and their hash, on either side of the log."""

    token_ids: list[int] = field(default_factory=list)
    prefix_hash: int = EMPTY_HASH
    is_finished: bool = False

    def extend(self, token_ids: Sequence[int]) -> None:
        self.token_ids.extend(token_ids)
        self.prefix_hash = extend_hash(self.prefix_hash, token_ids)

    def stands_at(self, index: int, prefix_hash: int) -> bool:
        """Whether what is at this position follows the chain's tokens."""
        return index == len(self.token_ids) and prefix_hash == self.prefix_hash
