"""Writes a step's keys and values to the paged cache."""

import torch
from torch import Tensor

from kernels.shapes import check_shape

FLOAT8_MAX = 448.0


def store_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> None:
    """Write token t to slot ``slots[t]``, or nowhere if that is negative; no other slot changes.

    ``key`` and ``value`` are [num_tokens, num_kv_heads, head_dim], the caches are contiguous
    [num_blocks, block_size, num_kv_heads, head_dim] of the same dtype, or of float8_e4m3fn, whose
    nearest number of at most 448 is stored. ``slots`` is [num_tokens]
    int64 without duplicates except negative slots; slot s is position s % block_size of block s //
    block_size. Negative slots belong to tokens that only pad a batch to the size of a CUDA graph.
    Raises `ValueError` if shapes do not match.

    This provider reads the slots on the host, which synchronizes with the device.
    """
    check_store(key, value, key_cache, value_cache, slots)
    is_stored = slots >= 0
    if not bool(is_stored.all()):
        slots, key, value = slots[is_stored], key[is_stored], value[is_stored]
    for cache, rows in ((key_cache, key), (value_cache, value)):
        to, stored = cache.view(-1, *rows.shape[1:]), rows
        if cache.dtype == torch.float8_e4m3fn:
            to, stored = to.view(torch.uint8), to_float8(rows).view(torch.uint8)
        to.index_copy_(0, slots, stored)


def to_float8(numbers: Tensor) -> Tensor:
    """The nearest numbers of float8_e4m3fn, the largest of which is 448."""
    return numbers.clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn)


def check_store(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> None:
    """Raise `ValueError` if shapes do not match."""
    num_tokens, num_kv_heads, head_dim = key.shape
    check_shape("value", value, key.shape)
    check_shape("key_cache", key_cache, (None, None, num_kv_heads, head_dim))
    check_shape("value_cache", value_cache, key_cache.shape)
    check_shape("slots", slots, (num_tokens,))
