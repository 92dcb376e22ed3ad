"""Writes a step's keys and values to the paged cache."""

from torch import Tensor

from kernels.shapes import check_shape


def store_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> None:
    """Write token t to slot ``slots[t]``, or nowhere if that is negative; no other slot changes.

    ``key`` and ``value`` are [num_tokens, num_kv_heads, head_dim], the caches are contiguous
    [num_blocks, block_size, num_kv_heads, head_dim] of the same dtype. ``slots`` is [num_tokens]
    int64 without duplicates except negative slots; slot s is position s % block_size of block s //
    block_size. Negative slots belong to tokens that only pad a batch to the size of a CUDA graph.
    Raises `ValueError` if shapes do not match.

    This provider reads the slots on the host, which synchronizes with the device.
    """
    check_store(key, value, key_cache, value_cache, slots)
    is_stored = slots >= 0
    if not bool(is_stored.all()):
        slots, key, value = slots[is_stored], key[is_stored], value[is_stored]
    key_cache.view(-1, *key.shape[1:]).index_copy_(0, slots, key)
    value_cache.view(-1, *value.shape[1:]).index_copy_(0, slots, value)


def check_store(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> None:
    """Raise `ValueError` if shapes do not match."""
    num_tokens, num_kv_heads, head_dim = key.shape
    check_shape("value", value, key.shape)
    check_shape("key_cache", key_cache, (None, None, num_kv_heads, head_dim))
    check_shape("value_cache", value_cache, key_cache.shape)
    check_shape("slots", slots, (num_tokens,))
