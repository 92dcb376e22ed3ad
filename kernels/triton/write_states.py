"""The recurrent states of sequences, to blocks of the cache, in a single pass."""

from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from kernels.reference.read_states import floats_of
from kernels.triton.configurations import Configuration, launch
from kernels.triton.read_states import BLOCK_FLOATS, place_of


def write_states(
    states: Tensor,
    keys: Tensor,
    values: Tensor,
    blocks: Tensor,
    context_lens: Tensor,
    *,
    first: int,
) -> None:
    """See `kernels.reference.write_states`."""
    keys, values = floats_of(keys), floats_of(values)
    num_places, num_blocks, num_floats = keys.shape
    num_seqs, size = states.shape
    launch(
        _configuration(num_places, num_floats),
        (triton.cdiv(size, BLOCK_FLOATS), num_seqs),
        states.contiguous(),
        keys,
        values,
        blocks,
        context_lens,
        first,
        size,
        num_blocks,
        blocks.stride(0),
    )


@triton.jit(
    do_not_specialize=["first", "size", "num_blocks", "table_stride"],
    do_not_specialize_on_alignment=["blocks_ptr"],
)
def write_states_kernel(
    states_ptr,
    keys_ptr,
    values_ptr,
    blocks_ptr,
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
    is_there = (floats < size) & (tl.load(lens_ptr + seq) > 0)
    places, is_key = place_of(
        floats, is_there, blocks_ptr + seq * table_stride, first, num_blocks, NUM_PIECES, PIECE
    )
    state = tl.load(states_ptr + seq.to(tl.int64) * size + floats, mask=is_there, other=0.0)
    tl.store(keys_ptr + places, state, mask=is_there & is_key)
    tl.store(values_ptr + places, state, mask=is_there & (is_key == 0))


@cache
def _configuration(num_places: int, num_floats: int) -> Configuration:
    return Configuration(
        kernel=write_states_kernel,
        signature={
            **dict.fromkeys(("states_ptr", "keys_ptr", "values_ptr"), "*fp32:16"),
            "blocks_ptr": "*i32",
            "lens_ptr": "*i32:16",
            **dict.fromkeys(("first", "size", "num_blocks", "table_stride"), "i32"),
        },
        constexprs={"NUM_PIECES": 2 * num_places, "PIECE": num_floats, "BLOCK": BLOCK_FLOATS},
    )


CONFIGURATIONS = [_configuration(6, 4096)]
