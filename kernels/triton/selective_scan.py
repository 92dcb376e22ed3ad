"""The recurrence of selective state spaces of single channels, token by token: a program keeps the
states of some channels in registers."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.configurations import Configuration, launch
from kernels.triton.tokens import with_adjacent_heads

_BLOCK_CHANNELS = 32


def selective_scan(
    hidden: Tensor,
    steps: Tensor,
    rates: Tensor,
    writes: Tensor,
    reads: Tensor,
    states: Tensor,
    query_starts: Tensor,
) -> tuple[Tensor, Tensor]:
    """See `kernels.reference.selective_scan`. The bits of a token depend on its sequence alone."""
    (num_tokens, size), (num_seqs, _, state_dim) = hidden.shape, states.shape
    results = torch.empty(hidden.shape, dtype=torch.float32, device=hidden.device)
    after = torch.empty(states.shape, dtype=torch.float32, device=hidden.device)
    writes, reads, states = map(with_adjacent_heads, (writes, reads, states))
    if num_tokens:
        launch(
            _configuration(state_dim),
            (triton.cdiv(size, _BLOCK_CHANNELS), num_seqs),
            results,
            after,
            hidden.contiguous(),
            steps.contiguous(),
            rates.contiguous(),
            writes,
            reads,
            states,
            query_starts,
            size,
            writes.stride(0),
            reads.stride(0),
            states.stride(0),
        )
    return results, after


@triton.jit
def selective_scan_kernel(
    results_ptr,
    after_ptr,
    hidden_ptr,
    steps_ptr,
    rates_ptr,
    writes_ptr,
    reads_ptr,
    states_ptr,
    starts_ptr,
    size,
    write_stride,
    read_stride,
    state_stride,
    STATE_DIM: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """BLOCK_C channels of a sequence (second dimension of the grid) per program."""
    seq = tl.program_id(1)
    channels, ns = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_N)
    is_channel, is_n = channels < size, ns < STATE_DIM
    places = channels[:, None] * STATE_DIM + ns[None, :]
    is_state = is_channel[:, None] & is_n[None, :]
    rates = tl.load(rates_ptr + places, mask=is_state, other=0.0)
    state = tl.load(states_ptr + seq.to(tl.int64) * state_stride + places, mask=is_state, other=0.0)
    start, end = tl.load(starts_ptr + seq), tl.load(starts_ptr + seq + 1)
    for offset in tl.range(0, end - start):
        at = start.to(tl.int64) + offset
        hidden = tl.load(hidden_ptr + at * size + channels, mask=is_channel, other=0.0)
        step = tl.load(steps_ptr + at * size + channels, mask=is_channel, other=0.0)
        write = tl.load(writes_ptr + at * write_stride + ns, mask=is_n, other=0.0)
        read = tl.load(reads_ptr + at * read_stride + ns, mask=is_n, other=0.0)
        decays = tl.exp(step[:, None] * rates)
        state = state * decays + (hidden * step)[:, None] * write[None, :]
        result = tl.sum(state * read[None, :], axis=1)
        tl.store(results_ptr + at * size + channels, result, mask=is_channel)
    after = after_ptr + seq.to(tl.int64) * size * STATE_DIM
    tl.store(after + places, state, mask=is_state)


@cache
def _configuration(state_dim: int) -> Configuration:
    floats = ("hidden_ptr", "steps_ptr", "rates_ptr", "writes_ptr", "reads_ptr", "states_ptr")
    sizes = ("size", "write_stride", "read_stride", "state_stride")
    return Configuration(
        kernel=selective_scan_kernel,
        signature={
            **dict.fromkeys(("results_ptr", "after_ptr", *floats), "*fp32:16"),
            "starts_ptr": "*i32:16",
            **dict.fromkeys(sizes, "i32:16"),
        },
        constexprs={
            "STATE_DIM": state_dim,
            "BLOCK_C": _BLOCK_CHANNELS,
            "BLOCK_N": int(triton.next_power_of_2(state_dim)),
        },
        num_warps=1,
    )


CONFIGURATIONS = [_configuration(16)]
