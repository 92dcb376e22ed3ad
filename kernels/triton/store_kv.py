"""Writes a step's keys and values to the paged cache."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference.store_kv import check_store
from kernels.triton.configurations import POINTER_TYPES, Configuration, launch
from kernels.triton.tokens import check_contiguous, check_dtypes, check_tokens


def store_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> None:
    """See `kernels.reference.store_kv`; tokens may be strided. Reads and writes each element once.

    Slots stay on the device.
    """
    check_store(key, value, key_cache, value_cache, slots)
    check_tokens(key=key, value=value)
    check_contiguous(key_cache=key_cache, value_cache=value_cache, slots=slots)
    check_dtypes(key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    num_tokens, num_kv_heads, head_dim = key.shape
    if num_tokens:
        launch(
            _configuration(key.dtype, head_dim),
            (num_tokens, num_kv_heads),
            key_cache,
            value_cache,
            key,
            value,
            slots,
            key.stride(0),
            value.stride(0),
        )


@triton.jit
def store_kv_kernel(
    key_cache_ptr,
    value_cache_ptr,
    key_ptr,
    value_ptr,
    slots_ptr,
    key_stride,
    value_stride,
    HEAD_DIM: tl.constexpr,
):
    """Program (token, key head): copy a key and a value."""
    token, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    place = (slot * tl.num_programs(1) + kv_head) * HEAD_DIM
    copy_head(key_cache_ptr + place, key_ptr + token * key_stride + kv_head * HEAD_DIM, HEAD_DIM)
    copy_head(
        value_cache_ptr + place, value_ptr + token * value_stride + kv_head * HEAD_DIM, HEAD_DIM
    )


@triton.jit
def copy_head(to_ptr, from_ptr, HEAD_DIM: tl.constexpr):
    columns = tl.arange(0, triton.next_power_of_2(HEAD_DIM))
    is_column = columns < HEAD_DIM
    tl.store(to_ptr + columns, tl.load(from_ptr + columns, mask=is_column), mask=is_column)


@cache
def _configuration(dtype: torch.dtype, head_dim: int) -> Configuration:
    pointers = ("key_cache_ptr", "value_cache_ptr", "key_ptr", "value_ptr")
    return Configuration(
        kernel=store_kv_kernel,
        signature={
            **dict.fromkeys(pointers, POINTER_TYPES[dtype]),
            "slots_ptr": "*i64:16",
            "key_stride": "i32:16",
            "value_stride": "i32:16",
        },
        constexprs={"HEAD_DIM": head_dim},
        num_warps=1,
    )


CONFIGURATIONS = (_configuration(torch.bfloat16, 128),)
