"""The accepted tokens of one choice, as both readers and writers of its log track them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

EMPTY_HASH = 0xCBF29CE484222325
_HASH_PRIME = 0x100000001B3
_HASH_MASK = (1 << 64) - 1


def extend_hash(prefix_hash: int, token_ids: Iterable[int]) -> int:
    """Extend a 64-bit FNV-1a hash, over whole token ids; `EMPTY_HASH` is the hash of no tokens."""
    for token_id in token_ids:
        prefix_hash = ((prefix_hash ^ token_id) * _HASH_PRIME) & _HASH_MASK
    return prefix_hash


@dataclass(slots=True)
class TokenChain:
    """The token ids of one choice and their hash."""

    token_ids: list[int] = field(default_factory=list)
    prefix_hash: int = EMPTY_HASH
    is_finished: bool = False

    def extend(self, token_ids: Sequence[int]) -> None:
        self.token_ids.extend(token_ids)
        self.prefix_hash = extend_hash(self.prefix_hash, token_ids)

    def stands_at(self, index: int, prefix_hash: int) -> bool:
        """Whether an event at this position directly follows the chain's tokens."""
        return index == len(self.token_ids) and prefix_hash == self.prefix_hash
