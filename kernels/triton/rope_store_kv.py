"""Rotary embedding of queries and keys, fused with writing keys and values to the paged cache."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference.rope import check_rotation
from kernels.reference.store_kv import check_store
from kernels.triton.configurations import (
    POINTER_TYPES,
    Configuration,
    has_pdl,
    launch,
    pdl_targets,
)
from kernels.triton.store_kv import copy_head
from kernels.triton.tokens import check_contiguous, check_dtypes, check_tokens, group_size


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
    """See `kernels.reference.rope_store_kv`; tokens may be strided, and the result is a new tensor.

    A launch reads and writes each element of query, key and value once, and reads a row of the
    table for each key head. Slots stay on the device.
    """
    check_rotation(query, key, positions, rope_table)
    check_store(key, value, key_cache, value_cache, slots)
    check_tokens(query=query, key=key, value=value)
    check_contiguous(
        positions=positions,
        rope_table=rope_table,
        key_cache=key_cache,
        value_cache=value_cache,
        slots=slots,
    )
    check_dtypes(query=query, key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    turned = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    num_tokens, num_kv_heads, head_dim = key.shape
    if num_tokens:
        group = group_size(query.shape[1], num_kv_heads)
        launch(
            _configuration(query.dtype, head_dim, group, has_pdl(query.device)),
            (num_tokens, num_kv_heads),
            turned,
            key_cache,
            value_cache,
            query,
            key,
            value,
            positions,
            rope_table,
            slots,
            query.stride(0),
            key.stride(0),
            value.stride(0),
        )
    return turned


@triton.jit
def rope_store_kv_kernel(
    turned_ptr,
    key_cache_ptr,
    value_cache_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    positions_ptr,
    table_ptr,
    slots_ptr,
    query_stride,
    key_stride,
    value_stride,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_PDL: tl.constexpr,
):
    """Program (token, key head): rotate and store that head, and rotate its query heads."""
    if HAS_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    slot = tl.load(slots_ptr + token)
    angles_ptr = table_ptr + tl.load(positions_ptr + token) * HEAD_DIM
    turn_group(turned_ptr, query_ptr, query_stride, angles_ptr, HEAD_DIM, GROUP)
    if slot < 0:
        return
    place = (slot * num_kv_heads + kv_head) * HEAD_DIM
    turn_heads(
        key_cache_ptr + place,
        key_ptr + token * key_stride + kv_head * HEAD_DIM,
        angles_ptr,
        HEAD_DIM,
        1,
    )
    copy_head(
        value_cache_ptr + place, value_ptr + token * value_stride + kv_head * HEAD_DIM, HEAD_DIM
    )


@triton.jit
def turn_group(
    turned_ptr, heads_ptr, stride, angles_ptr, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr
):
    """Rotate the query heads of this program's token that share its key head."""
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    turn_heads(
        turned_ptr + (token * tl.num_programs(1) + group) * GROUP * HEAD_DIM,
        heads_ptr + token * stride + group * GROUP * HEAD_DIM,
        angles_ptr,
        HEAD_DIM,
        GROUP,
    )


@triton.jit
def turn_heads(turned_ptr, heads_ptr, angles_ptr, HEAD_DIM: tl.constexpr, NUM_HEADS: tl.constexpr):
    """Rotate NUM_HEADS adjacent heads by the angles whose cosines and sines start at the
    pointer."""
    HALF: tl.constexpr = HEAD_DIM // 2
    heads = tl.arange(0, triton.next_power_of_2(NUM_HEADS))[:, None]
    pairs = tl.arange(0, triton.next_power_of_2(HALF))
    is_place = (heads < NUM_HEADS) & (pairs < HALF)[None, :]
    cosines = tl.load(angles_ptr + pairs, mask=pairs < HALF, other=0.0)[None, :]
    sines = tl.load(angles_ptr + HALF + pairs, mask=pairs < HALF, other=0.0)[None, :]
    places = heads * HEAD_DIM + pairs[None, :]
    first = tl.load(heads_ptr + places, mask=is_place, other=0.0).to(tl.float32)
    second = tl.load(heads_ptr + places + HALF, mask=is_place, other=0.0).to(tl.float32)
    dtype: tl.constexpr = turned_ptr.dtype.element_ty
    tl.store(turned_ptr + places, (first * cosines - second * sines).to(dtype), mask=is_place)
    tl.store(
        turned_ptr + places + HALF, (second * cosines + first * sines).to(dtype), mask=is_place
    )


@cache
def _configuration(dtype: torch.dtype, head_dim: int, group: int, uses_pdl: bool) -> Configuration:
    pointers = (
        "turned_ptr",
        "key_cache_ptr",
        "value_cache_ptr",
        "query_ptr",
        "key_ptr",
        "value_ptr",
    )
    return Configuration(
        kernel=rope_store_kv_kernel,
        signature={
            **dict.fromkeys(pointers, POINTER_TYPES[dtype]),
            "positions_ptr": "*i64:16",
            "table_ptr": "*fp32:16",
            "slots_ptr": "*i64:16",
            "query_stride": "i32:16",
            "key_stride": "i32:16",
            "value_stride": "i32:16",
        },
        constexprs={"HEAD_DIM": head_dim, "GROUP": group, "HAS_PDL": uses_pdl},
        num_warps=1,
        targets=pdl_targets(uses_pdl),
    )


CONFIGURATIONS = tuple(
    _configuration(torch.bfloat16, head_dim, group, uses_pdl)
    for head_dim, group in ((64, 3), (128, 4))
    for uses_pdl in (False, True)
)
