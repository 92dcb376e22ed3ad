"""Rotary position embedding (Su et al., arXiv:2104.09864), halves rotated against each other."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference.rope import check_rotation
from kernels.triton.configurations import POINTER_TYPES, Configuration, launch
from kernels.triton.tokens import check_contiguous, check_dtypes, check_tokens, group_size


def rope(
    query: Tensor, key: Tensor, positions: Tensor, rope_table: Tensor
) -> tuple[Tensor, Tensor]:
    """See `kernels.reference.rope`; tokens may lie apart, and the results are new.

    One launch reads and writes each element once, and a row of the table for each key head.
    """
    check_rotation(query, key, positions, rope_table)
    check_tokens(query=query, key=key)
    check_contiguous(positions=positions, rope_table=rope_table)
    check_dtypes(query=query, key=key)
    turned = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    turned_key = torch.empty(key.shape, dtype=key.dtype, device=key.device)
    num_tokens, num_kv_heads, head_dim = key.shape
    if num_tokens:
        launch(
            _configuration(query.dtype, head_dim, group_size(query.shape[1], num_kv_heads)),
            (num_tokens, num_kv_heads),
            turned,
            turned_key,
            query,
            key,
            positions,
            rope_table,
            query.stride(0),
            key.stride(0),
        )
    return turned, turned_key


@triton.jit
def rope_kernel(
    turned_ptr,
    turned_key_ptr,
    query_ptr,
    key_ptr,
    positions_ptr,
    table_ptr,
    query_stride,
    key_stride,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Program (token, key head) turns that head and the query heads that share it."""
    angles_ptr = table_ptr + tl.load(positions_ptr + tl.program_id(0)) * HEAD_DIM
    turn_group(turned_ptr, query_ptr, query_stride, angles_ptr, HEAD_DIM, GROUP)
    turn_group(turned_key_ptr, key_ptr, key_stride, angles_ptr, HEAD_DIM, 1)


@triton.jit
def turn_group(
    turned_ptr, heads_ptr, stride, angles_ptr, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr
):
    """Turn those of this program's token, (token, key head), that belong to its key head."""
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
    """Turn NUM_HEADS adjacent heads by the angles whose cosines and sines begin at the pointer."""
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
def _configuration(dtype: torch.dtype, head_dim: int, group: int) -> Configuration:
    pointers = ("turned_ptr", "turned_key_ptr", "query_ptr", "key_ptr")
    return Configuration(
        kernel=rope_kernel,
        signature={
            **dict.fromkeys(pointers, POINTER_TYPES[dtype]),
            "positions_ptr": "*i64:16",
            "table_ptr": "*fp32:16",
            "query_stride": "i32:16",
            "key_stride": "i32:16",
        },
        constexprs={"HEAD_DIM": head_dim, "GROUP": group},
        num_warps=1,
    )


CONFIGURATIONS = (_configuration(torch.bfloat16, 128, 4),)
