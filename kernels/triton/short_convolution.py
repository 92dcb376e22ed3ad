"""A causal convolution of each channel over a few tokens, in a single pass."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.configurations import POINTER_TYPES, Configuration, launch
from kernels.triton.tokens import with_adjacent_heads

_BLOCK_TOKENS = 4
_BLOCK_CHANNELS = 256
_BLOCK_SEQS = 128


def short_convolution(
    hidden: Tensor, taps: Tensor, bias: Tensor | None, states: Tensor, query_starts: Tensor
) -> tuple[Tensor, Tensor]:
    """See `kernels.reference.short_convolution`. The bits of a token depend on its sequence
    alone."""
    (num_tokens, size), num_seqs = hidden.shape, len(states)
    results = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    after = torch.empty(states.shape, dtype=torch.float32, device=hidden.device)
    hidden, states = with_adjacent_heads(hidden), with_adjacent_heads(states)
    num_tiles = triton.cdiv(num_tokens, _BLOCK_TOKENS)
    if num_tokens:
        launch(
            _configuration(hidden.dtype, len(taps), bias is not None),
            (triton.cdiv(size, _BLOCK_CHANNELS), num_tiles + num_seqs),
            results,
            after,
            hidden,
            taps.contiguous(),
            taps if bias is None else bias,
            states,
            query_starts,
            num_tokens,
            num_seqs,
            size,
            hidden.stride(0),
            states.stride(0),
        )
    return results, after


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def short_convolution_kernel(
    results_ptr,
    after_ptr,
    hidden_ptr,
    taps_ptr,
    bias_ptr,
    states_ptr,
    starts_ptr,
    num_tokens,
    num_seqs,
    size,
    hidden_stride,
    state_stride,
    NUM_TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """BLOCK_C channels of BLOCK_T tokens per program, or of the state of a sequence."""
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_channel = channels < size
    tile, num_tiles = tl.program_id(1), tl.cdiv(num_tokens, BLOCK_T)
    if tile < num_tiles:
        tokens = tile * BLOCK_T + tl.arange(0, BLOCK_T)
        is_token = tokens < num_tokens
        # A token's sequence is the last that begins at or before the token. Sequences that have no
        # tokens begin where the next sequence does.
        num_begun = tl.zeros([BLOCK_T], tl.int32)
        for first in tl.range(0, num_seqs, BLOCK_S):
            seqs = first + tl.arange(0, BLOCK_S)
            starts = tl.load(starts_ptr + seqs, mask=seqs < num_seqs, other=1 << 30)
            num_begun += tl.sum((starts[None, :] <= tokens[:, None]).to(tl.int32), axis=1)
        own = num_begun - 1
        offsets = tokens - tl.load(starts_ptr + own, mask=is_token, other=0)
        total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
        if HAS_BIAS:
            total += tl.load(bias_ptr + channels, mask=is_channel, other=0.0)[None, :]
        for k in tl.static_range(NUM_TAPS):
            inputs = _inputs(
                hidden_ptr,
                states_ptr + (own.to(tl.int64) * state_stride)[:, None],
                tokens - (NUM_TAPS - 1 - k),
                offsets - (NUM_TAPS - 1 - k),
                is_token,
                channels,
                is_channel,
                size,
                hidden_stride,
                NUM_TAPS,
            )
            tap = tl.load(taps_ptr + k * size + channels, mask=is_channel, other=0.0)
            total += tap[None, :] * inputs
        places = tokens.to(tl.int64)[:, None] * size + channels[None, :]
        is_place = is_token[:, None] & is_channel[None, :]
        tl.store(results_ptr + places, total.to(results_ptr.dtype.element_ty), mask=is_place)
    else:
        seq = tile - num_tiles
        start, end = tl.load(starts_ptr + seq), tl.load(starts_ptr + seq + 1)
        state = states_ptr + seq.to(tl.int64) * state_stride
        after = after_ptr + seq.to(tl.int64) * ((NUM_TAPS - 1) * size) + channels
        for k in tl.static_range(NUM_TAPS - 1):
            token = end - (NUM_TAPS - 1) + k + tl.zeros([1], tl.int32)
            kept = _inputs(
                hidden_ptr,
                state,
                token,
                token - start,
                token < end,
                channels,
                is_channel,
                size,
                hidden_stride,
                NUM_TAPS,
            )
            tl.store(after + k * size, tl.reshape(kept, (BLOCK_C,)), mask=is_channel)


@triton.jit
def _inputs(
    hidden_ptr,
    state_ptr,
    tokens,
    offsets,
    is_token,
    channels,
    is_channel,
    size,
    hidden_stride,
    NUM_TAPS: tl.constexpr,
):
    """The inputs [tokens, channels] at these offsets in their sequences; negative offsets are in
    the states."""
    is_new = is_token & (offsets >= 0)
    new = tl.load(
        hidden_ptr + (tokens.to(tl.int64) * hidden_stride)[:, None] + channels[None, :],
        mask=is_new[:, None] & is_channel[None, :],
        other=0.0,
    )
    is_old = is_token & (offsets < 0)
    old = tl.load(
        state_ptr + ((NUM_TAPS - 1 + offsets) * size)[:, None] + channels[None, :],
        mask=is_old[:, None] & is_channel[None, :],
        other=0.0,
    )
    return tl.where(is_new[:, None], new.to(tl.float32), old)


@cache
def _configuration(dtype: torch.dtype, num_taps: int, has_bias: bool) -> Configuration:
    floats = ("after_ptr", "taps_ptr", "bias_ptr", "states_ptr")
    return Configuration(
        kernel=short_convolution_kernel,
        signature={
            **dict.fromkeys(("results_ptr", "hidden_ptr"), POINTER_TYPES[dtype]),
            **dict.fromkeys(floats, "*fp32:16"),
            "starts_ptr": "*i32:16",
            **dict.fromkeys(("num_tokens", "num_seqs"), "i32"),
            **dict.fromkeys(("size", "hidden_stride", "state_stride"), "i32:16"),
        },
        constexprs={
            "NUM_TAPS": num_taps,
            "HAS_BIAS": has_bias,
            "BLOCK_T": _BLOCK_TOKENS,
            "BLOCK_C": _BLOCK_CHANNELS,
            "BLOCK_S": _BLOCK_SEQS,
        },
    )


CONFIGURATIONS = [
    _configuration(torch.bfloat16, 3, has_bias=False),
    _configuration(torch.bfloat16, 4, has_bias=False),
    _configuration(torch.float32, 4, has_bias=True),
]
