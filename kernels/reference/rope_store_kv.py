"""Rotary embedding of queries and keys, fused with writing keys and values to the paged cache."""

from torch import Tensor

from kernels.reference.rope import rope
from kernels.reference.store_kv import store_kv


def rope_store_kv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    rope_table: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
) -> Tensor:
    """Rotate, write token t's key and value to slot ``slots[t]``, and return the rotated query.

    See `rope` and `store_kv` for tensors, dtypes and errors. A token with a negative slot is not
    written, but its query is returned all the same.
    """
    query, key = rope(query, key, positions, rope_table)
    store_kv(key, value, key_cache, value_cache, slots)
    return query
