"""The recurrent states of sequences, from blocks of the cache, in a single pass."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference.read_states import floats_of
from kernels.triton.configurations import Configuration, launch

BLOCK_FLOATS = 1024


def read_states(
    keys: Tensor,
    values: Tensor,
    blocks: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    *,
    first: int,
    size: int,
) -> Tensor:
    """See `kernels.reference.read_states`."""
    keys, values = floats_of(keys), floats_of(values)
    num_places, num_blocks, num_floats = keys.shape
    states = torch.empty(len(blocks), size, dtype=torch.float32, device=keys.device)
    launch(
        _configuration(num_places, num_floats),
        (triton.cdiv(size, BLOCK_FLOATS), len(blocks)),
        states,
        keys,
        values,
        blocks,
        query_starts,
        context_lens,
        first,
        size,
        num_blocks,
        blocks.stride(0),
    )
    return states


@triton.jit(
    do_not_specialize=["first", "size", "num_blocks", "table_stride"],
    do_not_specialize_on_alignment=["blocks_ptr"],
)
def read_states_kernel(
    states_ptr,
    keys_ptr,
    values_ptr,
    blocks_ptr,
    starts_ptr,
    lens_ptr,
    first,
    size,
    num_blocks,
    table_stride,
    NUM_PIECES: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK floats of the state of a sequence per program."""
    seq, floats = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    num_tokens = tl.load(starts_ptr + seq + 1) - tl.load(starts_ptr + seq)
    # A state that does not exist yet is not read: its memory may hold NaN.
    is_there = (floats < size) & (tl.load(lens_ptr + seq) > num_tokens)
    places, is_key = place_of(
        floats, is_there, blocks_ptr + seq * table_stride, first, num_blocks, NUM_PIECES, PIECE
    )
    state = tl.load(keys_ptr + places, mask=is_there & is_key, other=0.0)
    state += tl.load(values_ptr + places, mask=is_there & (is_key == 0), other=0.0)
    tl.store(states_ptr + seq.to(tl.int64) * size + floats, state, mask=floats < size)


@triton.jit
def place_of(
    floats,
    is_there,
    table_ptr,
    first,
    num_blocks,
    NUM_PIECES: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Where floats of a state are among the keys or values, and whether among the keys."""
    pieces = first + floats // PIECE
    blocks = tl.load(table_ptr + pieces // NUM_PIECES, mask=is_there, other=0)
    pieces = pieces % NUM_PIECES
    rows = (pieces // 2 * num_blocks + blocks).to(tl.int64)
    return rows * PIECE + floats % PIECE, pieces % 2 == 0


@cache
def _configuration(num_places: int, num_floats: int) -> Configuration:
    return Configuration(
        kernel=read_states_kernel,
        signature={
            **dict.fromkeys(("states_ptr", "keys_ptr", "values_ptr"), "*fp32:16"),
            "blocks_ptr": "*i32",
            **dict.fromkeys(("starts_ptr", "lens_ptr"), "*i32:16"),
            **dict.fromkeys(("first", "size", "num_blocks", "table_stride"), "i32"),
        },
        constexprs={"NUM_PIECES": 2 * num_places, "PIECE": num_floats, "BLOCK": BLOCK_FLOATS},
    )


CONFIGURATIONS = [_configuration(6, 4096)]
