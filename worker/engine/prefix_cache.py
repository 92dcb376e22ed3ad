"""The prefix cache: sequences with the same prefix share its blocks."""

from array import array
from hashlib import blake2b

from worker.engine.block_pool import BlockPool
from worker.engine.sequence import Sequence

_NAME_BYTES = 16
"""Long enough to rule out collisions, which would give wrong answers or leak another tenant's
prompt."""


class PrefixCache:
    """Names full blocks by their content and finds them again.

    A block's name is a hash of the previous block's name and the block's own token ids, so it
    identifies all tokens up to the end of the block. The first block is hashed with the tenant, so
    that timing reveals nothing about other tenants' prompts. Each block of a sequence is hashed
    once.
    """

    def __init__(self, pool: BlockPool, *, is_on: bool) -> None:
        self._pool = pool
        self._is_on = is_on

    def find(self, sequence: Sequence) -> list[int]:
        """The cached blocks for the start of a waiting sequence; no references are taken.

        Covers at most ``num_cacheable`` tokens.
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
        """Make blocks findable that launched steps have filled with known tokens.

        Tokens of a sequence's last step are unknown when its blocks are freed, so the block that
        they fill is not cached.
        """
        num_known = min(sequence.num_computed, len(sequence.token_ids))
        num_full = num_known // self._pool.block_size if self._is_on else 0
        for k in range(sequence.num_published, num_full):
            self._pool.name(sequence.block_table[k], self._name(sequence, k))
        sequence.num_published = num_full

    def forget(self, sequence: Sequence) -> None:
        """Make the blocks of a sequence impossible to find, including blocks that it found itself.
        Sequences that use them keep them."""
        for name in sequence.block_names:
            self._pool.forget(name)

    def check_invariants(self, sequence: Sequence) -> None:
        """Assert that the published blocks match the sequence's tokens, and that no block was named
        before all its tokens were known."""
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
    # A separate hash space, so that no tenant name can collide with a block's name.
    return blake2b(tenant.encode(), digest_size=_NAME_BYTES, person=b"tenant").digest()
