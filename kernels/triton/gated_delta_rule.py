"""The gated delta rule, token by token: a program keeps columns of a head's state in registers.

Columns do not depend on one another. A state is read and written once for all tokens of a step.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.configurations import POINTER_TYPES, Configuration, launch
from kernels.triton.tokens import with_adjacent_heads

_BLOCK_VALUES = 8


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decays: Tensor,
    strengths: Tensor,
    states: Tensor,
    query_starts: Tensor,
) -> tuple[Tensor, Tensor]:
    """See `kernels.reference.gated_delta_rule`. The bits of a token depend on its sequence
    alone."""
    num_tokens, num_heads, value_dim = value.shape
    num_seqs, _, key_dim, _ = states.shape
    results = torch.empty(value.shape, dtype=torch.float32, device=value.device)
    after = torch.empty(states.shape, dtype=torch.float32, device=value.device)
    query, key, value = map(with_adjacent_heads, (query, key, value))
    states = with_adjacent_heads(states)
    if num_tokens:
        launch(
            _configuration(
                value.dtype,
                key_dim,
                value_dim,
                num_heads // key.shape[1],
                has_key_decays=decays.ndim == 3,
            ),
            (triton.cdiv(value_dim, _BLOCK_VALUES), num_heads, num_seqs),
            results,
            after,
            query,
            key,
            value,
            decays.contiguous(),
            strengths.contiguous(),
            states,
            query_starts,
            query.stride(0),
            key.stride(0),
            value.stride(0),
            states.stride(0),
        )
    return results, after


@triton.jit
def gated_delta_rule_kernel(
    results_ptr,
    after_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    decays_ptr,
    strengths_ptr,
    states_ptr,
    starts_ptr,
    query_stride,
    key_stride,
    value_stride,
    state_stride,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    HAS_KEY_DECAYS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """BLOCK_V columns of the state of a head (second dimension of the grid) of a sequence (third
    dimension) per program."""
    head, seq = tl.program_id(1), tl.program_id(2)
    num_heads = tl.num_programs(1)
    ks, vs = tl.arange(0, BLOCK_K), tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key, is_value = ks < KEY_DIM, vs < VALUE_DIM
    places = (head * KEY_DIM + ks)[:, None] * VALUE_DIM + vs[None, :]
    is_state = is_key[:, None] & is_value[None, :]
    state = tl.load(states_ptr + seq.to(tl.int64) * state_stride + places, mask=is_state, other=0.0)
    key_places = head // NUM_SHARED * KEY_DIM + ks
    start, end = tl.load(starts_ptr + seq), tl.load(starts_ptr + seq + 1)
    for offset in tl.range(0, end - start):
        row = start.to(tl.int64) + offset
        query = tl.load(query_ptr + row * query_stride + key_places, mask=is_key, other=0.0)
        key = tl.load(key_ptr + row * key_stride + key_places, mask=is_key, other=0.0)
        value = tl.load(
            value_ptr + row * value_stride + head * VALUE_DIM + vs, mask=is_value, other=0.0
        )
        of_head = row * num_heads + head
        strength = tl.load(strengths_ptr + of_head)
        if HAS_KEY_DECAYS:
            decays = tl.load(decays_ptr + of_head * KEY_DIM + ks, mask=is_key, other=0.0)
            state *= decays[:, None]
        else:
            state *= tl.load(decays_ptr + of_head)
        key = _normalized(key)
        known = tl.sum(state * key[:, None], axis=0)
        correction = (value.to(tl.float32) - known) * strength
        state += key[:, None] * correction[None, :]
        result = tl.sum(state * (_normalized(query) * KEY_DIM**-0.5)[:, None], axis=0)
        tl.store(results_ptr + of_head * VALUE_DIM + vs, result, mask=is_value)
    after = after_ptr + seq.to(tl.int64) * num_heads * (KEY_DIM * VALUE_DIM)
    tl.store(after + places, state, mask=is_state)


@triton.jit
def _normalized(head):
    wide = head.to(tl.float32)
    return wide * tl.rsqrt(tl.sum(wide * wide) + 1e-6)


@cache
def _configuration(
    dtype: torch.dtype, key_dim: int, value_dim: int, num_shared: int, *, has_key_decays: bool
) -> Configuration:
    floats = ("results_ptr", "after_ptr", "decays_ptr", "strengths_ptr", "states_ptr")
    strides = ("query_stride", "key_stride", "value_stride", "state_stride")
    return Configuration(
        kernel=gated_delta_rule_kernel,
        signature={
            **dict.fromkeys(floats, "*fp32:16"),
            **dict.fromkeys(("query_ptr", "key_ptr", "value_ptr"), POINTER_TYPES[dtype]),
            "starts_ptr": "*i32:16",
            **dict.fromkeys(strides, "i32:16"),
        },
        constexprs={
            "KEY_DIM": key_dim,
            "VALUE_DIM": value_dim,
            "NUM_SHARED": num_shared,
            "HAS_KEY_DECAYS": has_key_decays,
            "BLOCK_K": int(triton.next_power_of_2(key_dim)),
            "BLOCK_V": _BLOCK_VALUES,
        },
        num_warps=1,
    )


CONFIGURATIONS = [
    _configuration(torch.bfloat16, 128, 128, 2, has_key_decays=False),
    _configuration(torch.bfloat16, 96, 192, 1, has_key_decays=False),
    _configuration(torch.bfloat16, 128, 128, 1, has_key_decays=True),
]
