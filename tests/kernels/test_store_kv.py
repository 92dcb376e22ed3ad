"""Keys and values are written to their slots, and nowhere else."""

import pytest
import torch

from kernels.providers import Ops
from tests.support.models.numerics import poisoned

NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM = 5, 3, 2, 7
SLOTS = [14, 0, 4]


def test_each_token_lands_in_its_slot_and_no_other_slot_changes(ops: Ops) -> None:
    key, value = torch.randn(2, len(SLOTS), NUM_KV_HEADS, HEAD_DIM)
    keys, values = (poisoned(NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM) for _ in range(2))

    ops.store_kv(key, value, keys, values, torch.tensor(SLOTS))

    for cache, new in ((keys, key), (values, value)):
        for token, slot in enumerate(SLOTS):
            assert torch.equal(cache[slot // BLOCK_SIZE, slot % BLOCK_SIZE], new[token])
        assert int(cache.isnan().sum()) == cache.numel() - new.numel()


def test_parts_of_a_fused_projection_are_stored(ops: Ops) -> None:
    fused = torch.randn(len(SLOTS), 4 * NUM_KV_HEADS, HEAD_DIM)
    key, value = fused[:, 4:6], fused[:, 6:8]
    keys, values = (poisoned(NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM) for _ in range(2))

    ops.store_kv(key, value, keys, values, torch.tensor(SLOTS))

    assert torch.equal(keys.flatten(0, 1)[SLOTS], key)
    assert torch.equal(values.flatten(0, 1)[SLOTS], value)


def test_a_cache_of_other_heads_is_refused(ops: Ops) -> None:
    key = torch.ones(1, NUM_KV_HEADS, HEAD_DIM)
    cache = torch.ones(NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS + 1, HEAD_DIM)
    with pytest.raises(ValueError, match=r"has shape \[5, 3, 3, 7\], expected \[\*, \*, 2, 7\]"):
        ops.store_kv(key, key, cache, cache.clone(), torch.tensor([0]))
