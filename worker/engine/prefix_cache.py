"""Sequences that begin alike share the blocks of what they have in common."""

from array import array
from hashlib import blake2b

from worker.engine.block_pool import BlockPool
from worker.engine.sequence import Sequence

_NAME_BYTES = 16
"""Two blocks of one name would be a wrong answer, or one tenant's prompt in another's answer."""


class PrefixCache:
    """Names full blocks by their content and finds them again.

    A block's name is a hash of the name of the block before it and of its own token ids, so it
    stands for all tokens up to the block's end; the first one's goes back to the tenant's, so that
    nobody can find out by timing what another tenant has asked. Each block is hashed once in a
    sequence's life.
    """

    def __init__(self, pool: BlockPool, *, is_on: bool) -> None:
        self._pool = pool
        self._is_on = is_on

    def find(self, sequence: Sequence) -> list[int]:
        """The blocks that hold a waiting sequence's first tokens already; nobody holds them for it.

        No more than its ``num_cacheable``.
        """
        blocks: list[int] = []
        if self._is_on:
            for k in range(sequence.num_cacheable // self._pool.block_size):
                block = self._pool.find(self._name(sequence, k))
                if block is None:
                    break
                blocks.append(block)
        return blocks

    def publish(self, sequence: Sequence) -> None:
        """Let other sequences find the blocks that launched steps have filled with known tokens.

        What a sequence's very last step fills is not known before its blocks are freed, and is not
        found.
        """
        num_known = min(sequence.num_computed, len(sequence.token_ids))
        num_full = num_known // self._pool.block_size if self._is_on else 0
        for k in range(sequence.num_published, num_full):
            self._pool.name(sequence.block_table[k], self._name(sequence, k))
        sequence.num_published = num_full

    def check_invariants(self, sequence: Sequence) -> None:
        """Assert that what a sequence has published is what its tokens say, and that no block was
        named before all its tokens were known."""
        assert len(sequence.block_names) * self._pool.block_size <= len(sequence.token_ids)
        for k, block in enumerate(sequence.block_table[: sequence.num_published]):
            assert self._pool.name_of(block) in (None, self._name(sequence, k))

    def _name(self, sequence: Sequence, k: int) -> bytes:
        names, block_size = sequence.block_names, self._pool.block_size
        while len(names) <= k:
            parent = names[-1] if names else _tenant_name(sequence.submit.tenant)
            start = len(names) * block_size
            token_ids = array("I", sequence.token_ids[start : start + block_size])
            names.append(blake2b(parent + token_ids.tobytes(), digest_size=_NAME_BYTES).digest())
        return names[k]


def _tenant_name(tenant: str) -> bytes:
    # In a hash space of its own: no tenant can call itself as a block is called.
    return blake2b(tenant.encode(), digest_size=_NAME_BYTES, person=b"tenant").digest()
