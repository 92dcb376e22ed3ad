"""Writes a step's keys and values into the paged cache."""

from torch import Tensor

from kernels.shapes import check_shape


def store_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> None:
    """Write token t to slot ``slots[t]``; no other slot changes.

    ``key`` and ``value`` are [num_tokens, num_kv_heads, head_dim], the caches are contiguous
    [num_blocks, block_size, num_kv_heads, head_dim] of the same dtype, ``slots`` is [num_tokens]
    int64 without repetitions, slot s being place s % block_size of block s // block_size. Raises
    `ValueError` where shapes differ.
    """
    num_tokens, num_kv_heads, head_dim = key.shape
    check_shape("value", value, key.shape)
    check_shape("key_cache", key_cache, (None, None, num_kv_heads, head_dim))
    check_shape("value_cache", value_cache, key_cache.shape)
    check_shape("slots", slots, (num_tokens,))
    key_cache.view(-1, num_kv_heads, head_dim).index_copy_(0, slots, key)
    value_cache.view(-1, num_kv_heads, head_dim).index_copy_(0, slots, value)
