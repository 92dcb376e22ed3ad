"""Causal attention of packed queries over a paged KV cache."""

import ctypes

import torch
from torch import Tensor

from kernels.attention_spec import AttentionSpec
from kernels.native.library import (
    BatchView,
    CacheView,
    HeadsView,
    Library,
    RuleView,
    library,
    pointer,
)
from kernels.shapes import check_shape

SPAN = 32
HEAD_STEP = 16
MAX_HEAD_DIM = 576
CACHE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float8_e4m3fn: 2}


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    *,
    num_decodes: int,
    max_query_len: int,
    spec: AttentionSpec,
) -> Tensor:
    """See `kernels.reference.paged_attention`.

    Caches are float32, bfloat16 or float8_e4m3fn; head_dim is a multiple of 16, at most 576, and
    block_size divides 32. Computed in float32. A token's result is bit-identical whatever else is
    in the batch.
    """
    return attend(
        library(),
        query,
        key_cache,
        value_cache,
        block_tables,
        query_starts,
        context_lens,
        spec=spec,
    )


def attend(
    native: Library,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    *,
    spec: AttentionSpec,
) -> Tensor:
    """`paged_attention` of a given library, which may be built for another processor."""
    num_heads, head_dim = query.shape[1:]
    check_shape("key_cache", key_cache, (None, None, None, head_dim))
    check_shape("value_cache", value_cache, key_cache.shape)
    check_shape("block_tables", block_tables, (context_lens.shape[0], None))
    check_shape("query_starts", query_starts, (context_lens.shape[0] + 1,))
    wide = query.float().contiguous()
    out = torch.empty_like(wide)
    cache = cache_view(key_cache, value_cache)
    if num_heads % cache.num_kv_heads:
        raise ValueError(
            f"{num_heads} query heads are not a multiple of {cache.num_kv_heads} key heads"
        )
    batch = BatchView(
        pointer(block_tables),
        pointer(query_starts),
        pointer(context_lens),
        context_lens.shape[0],
        block_tables.shape[1],
    )
    heads = HeadsView(
        query=pointer(wide),
        stride=num_heads * head_dim,
        out=pointer(out),
        num_heads=num_heads,
        rule=rule_view(spec),
        format=0,
    )
    native.functions.warren_attention(
        native.team(),
        ctypes.byref(cache),
        ctypes.byref(batch),
        ctypes.byref(heads),
    )
    return out[..., : spec.value_dim].to(query.dtype)


def rule_view(spec: AttentionSpec) -> RuleView:
    """The constants of a layer; valid while its sinks and slopes exist."""
    return RuleView(
        sinks=pointer(spec.sinks),
        slopes=pointer(spec.slopes),
        scale=spec.scale,
        softcap=spec.softcap or 0.0,
        window=spec.window or 0,
        chunk=spec.chunk or 0,
    )


def cache_view(key_cache: Tensor, value_cache: Tensor) -> CacheView:
    """A layer's cache, [num_blocks, block_size, num_kv_heads, head_dim].

    Raises `ValueError` if the library does not support it.
    """
    _, block_size, num_kv_heads, head_dim = key_cache.shape
    if key_cache.dtype not in CACHE_TYPES or value_cache.dtype != key_cache.dtype:
        raise ValueError(
            f"a cache of {key_cache.dtype}, expected float32, bfloat16 or float8_e4m3fn"
        )
    if head_dim % HEAD_STEP or head_dim > MAX_HEAD_DIM or SPAN % block_size:
        raise ValueError(f"head_dim {head_dim} with blocks of {block_size} slots is not supported")
    return CacheView(
        pointer(key_cache),
        pointer(value_cache),
        CACHE_TYPES[key_cache.dtype],
        block_size,
        num_kv_heads,
        head_dim,
    )
