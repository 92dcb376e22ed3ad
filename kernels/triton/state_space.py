"""The recurrence of a selective state space, token by token: a program keeps some rows of a head's
state in registers.

Rows do not depend on one another. A state is read and written once for all tokens of a step.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.configurations import Configuration, launch
from kernels.triton.tokens import with_adjacent_heads

_BLOCK_ROWS = 8


def state_space(
    hidden: Tensor,
    steps: Tensor,
    rates: Tensor,
    writes: Tensor,
    reads: Tensor,
    states: Tensor,
    query_starts: Tensor,
) -> tuple[Tensor, Tensor]:
    """See `kernels.reference.state_space`. The bits of a token depend on its sequence alone."""
    num_tokens, num_heads, head_dim = hidden.shape
    num_seqs, state_dim = len(states), states.shape[3]
    results = torch.empty(hidden.shape, dtype=torch.float32, device=hidden.device)
    after = torch.empty(states.shape, dtype=torch.float32, device=hidden.device)
    hidden, writes, reads, states = map(with_adjacent_heads, (hidden, writes, reads, states))
    if num_tokens:
        launch(
            _configuration(head_dim, state_dim, num_heads // writes.shape[1]),
            (triton.cdiv(head_dim, _BLOCK_ROWS), num_heads, num_seqs),
            results,
            after,
            hidden,
            steps.contiguous(),
            rates.contiguous(),
            writes,
            reads,
            states,
            query_starts,
            hidden.stride(0),
            writes.stride(0),
            reads.stride(0),
            states.stride(0),
        )
    return results, after


@triton.jit
def state_space_kernel(
    results_ptr,
    after_ptr,
    hidden_ptr,
    steps_ptr,
    rates_ptr,
    writes_ptr,
    reads_ptr,
    states_ptr,
    starts_ptr,
    hidden_stride,
    write_stride,
    read_stride,
    state_stride,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """BLOCK_H rows of the state of a head (second dimension of the grid) of a sequence (third
    dimension) per program."""
    head, seq = tl.program_id(1), tl.program_id(2)
    num_heads = tl.num_programs(1)
    rows, ns = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_N)
    is_row, is_n = rows < HEAD_DIM, ns < STATE_DIM
    places = (head * HEAD_DIM + rows)[:, None] * STATE_DIM + ns[None, :]
    is_state = is_row[:, None] & is_n[None, :]
    state = tl.load(states_ptr + seq.to(tl.int64) * state_stride + places, mask=is_state, other=0.0)
    rate = tl.load(rates_ptr + head)
    group_places = head // NUM_SHARED * STATE_DIM + ns
    start, end = tl.load(starts_ptr + seq), tl.load(starts_ptr + seq + 1)
    for offset in tl.range(0, end - start):
        at = start.to(tl.int64) + offset
        hidden = tl.load(
            hidden_ptr + at * hidden_stride + head * HEAD_DIM + rows, mask=is_row, other=0.0
        )
        write = tl.load(writes_ptr + at * write_stride + group_places, mask=is_n, other=0.0)
        read = tl.load(reads_ptr + at * read_stride + group_places, mask=is_n, other=0.0)
        step = tl.load(steps_ptr + at * num_heads + head)
        state = state * tl.exp(step * rate) + (hidden * step)[:, None] * write[None, :]
        result = tl.sum(state * read[None, :], axis=1)
        tl.store(results_ptr + (at * num_heads + head) * HEAD_DIM + rows, result, mask=is_row)
    after = after_ptr + seq.to(tl.int64) * num_heads * (HEAD_DIM * STATE_DIM)
    tl.store(after + places, state, mask=is_state)


@cache
def _configuration(head_dim: int, state_dim: int, num_shared: int) -> Configuration:
    floats = ("hidden_ptr", "steps_ptr", "rates_ptr", "writes_ptr", "reads_ptr", "states_ptr")
    strides = ("hidden_stride", "write_stride", "read_stride", "state_stride")
    return Configuration(
        kernel=state_space_kernel,
        signature={
            **dict.fromkeys(("results_ptr", "after_ptr", *floats), "*fp32:16"),
            "starts_ptr": "*i32:16",
            **dict.fromkeys(strides, "i32:16"),
        },
        constexprs={
            "HEAD_DIM": head_dim,
            "STATE_DIM": state_dim,
            "NUM_SHARED": num_shared,
            "BLOCK_H": _BLOCK_ROWS,
            "BLOCK_N": int(triton.next_power_of_2(state_dim)),
        },
        num_warps=1,
    )


CONFIGURATIONS = [_configuration(64, 128, 48), _configuration(64, 256, 32)]
