"""Products with the matrices of experts, each with the rows of its tokens.

The number of programs depends on shapes alone. Each program finds its expert in sums over the
experts' numbers of rows, so that the host does not wait for the device, and a CUDA graph holds for
every choice of experts. Only the matrices of experts that have rows are read.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference.grouped_projection import check_groups
from kernels.triton.configurations import COMPILED_DTYPES, POINTER_TYPES, Configuration, launch


@dataclass(frozen=True, slots=True)
class _GroupTile:
    """``rows`` by ``outputs``, and the bytes of a row of inputs that are read at a time."""

    rows: int
    outputs: int
    input_bytes: int
    num_warps: int
    num_stages: int


_FEW = _GroupTile(16, 64, 256, num_warps=4, num_stages=3)
"""For experts with few rows each: the time to read the matrices is the limit."""
_MANY = _GroupTile(64, 128, 128, num_warps=4, num_stages=3)
_FEW_ROWS = 32
"""The most rows of an expert, on average, for which the smaller tile is used."""


def most_tiles(num_rows: int, num_experts: int, tile_rows: int) -> int:
    """The tiles of so many rows at most, however they are divided among the experts: an expert's
    last tile may be partly empty."""
    return min(num_rows, num_experts) + num_rows // tile_rows


def grouped_projection(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    order: Tensor,
    starts: Tensor,
    *,
    num_shared: int = 1,
    is_batch_invariant: bool = False,
) -> Tensor:
    """See `kernels.reference.grouped_projection`; sums are float32.

    With ``is_batch_invariant`` the tiles do not depend on the number of rows, so that a row's bits
    depend on its inputs alone.
    """
    check_groups(hidden, weight, bias, order, starts, num_shared)
    num_rows, (num_experts, outputs, inputs) = len(order), weight.shape
    out = torch.empty(num_rows, outputs, dtype=hidden.dtype, device=hidden.device)
    if not num_rows:
        return out
    is_few = num_rows <= _FEW_ROWS * num_experts and not is_batch_invariant
    tile = _FEW if is_few else _MANY
    num_tiles = most_tiles(num_rows, num_experts, tile.rows)
    launch(
        _configuration(
            hidden.dtype, bias is not None, tile, int(triton.next_power_of_2(num_experts))
        ),
        (triton.cdiv(outputs, tile.outputs), num_tiles),
        out,
        hidden.contiguous(),
        weight.contiguous(),
        weight if bias is None else bias.contiguous(),
        order,
        starts,
        num_experts,
        num_shared,
        outputs,
        inputs,
    )
    return out


@triton.jit
def tile_of_expert(starts_ptr, num_experts, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """The expert whose rows the program has, the first of these rows' places, and the end of all
    places of the expert. A program beyond all tiles has ``num_experts`` for its expert."""
    experts = tl.arange(0, BLOCK_E)
    is_expert = experts < num_experts
    begins = tl.load(starts_ptr + experts, mask=is_expert, other=0)
    ends = tl.load(starts_ptr + experts + 1, mask=is_expert, other=0)
    num_tiles = tl.cdiv(ends - begins, BLOCK_M)
    tile = tl.program_id(1)
    expert = tl.sum((tl.cumsum(num_tiles) <= tile).to(tl.int32))
    first_tile = tl.sum(tl.where(experts < expert, num_tiles, 0))
    known = tl.minimum(expert, num_experts - 1)
    first = tl.load(starts_ptr + known) + (tile - first_tile) * BLOCK_M
    return expert, first, tl.load(starts_ptr + known + 1)


@triton.jit(do_not_specialize=["num_experts", "num_shared"])
def grouped_projection_kernel(
    out_ptr,
    hidden_ptr,
    weight_ptr,
    bias_ptr,
    order_ptr,
    starts_ptr,
    num_experts,
    num_shared,
    outputs,
    inputs,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of BLOCK_M rows of one expert by BLOCK_N outputs per program."""
    expert, first, end = tile_of_expert(starts_ptr, num_experts, BLOCK_E, BLOCK_M)
    if expert >= num_experts:
        return
    places = first + tl.arange(0, BLOCK_M)
    is_row = places < end
    # Places beyond the last row repeat it instead of masking; their results are not stored.
    rows = tl.load(order_ptr + tl.minimum(places, end - 1))
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    outs = tl.minimum(columns, outputs - 1)
    ks = tl.arange(0, BLOCK_K)
    hidden = hidden_ptr + (rows // num_shared).to(tl.int64)[:, None] * inputs
    first_output = expert.to(tl.int64) * outputs
    weight = weight_ptr + (first_output + outs)[None, :] * inputs
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in tl.range(0, inputs, BLOCK_K):
        read = k + ks
        row_inputs = tl.load(hidden + read[None, :], mask=(read < inputs)[None, :], other=0.0)
        matrix = tl.load(weight + read[:, None], mask=(read < inputs)[:, None], other=0.0)
        total = tl.dot(row_inputs, matrix, total, input_precision=PRECISION)
    if HAS_BIAS:
        total += tl.load(bias_ptr + first_output + outs).to(tl.float32)[None, :]
    out_places = rows.to(tl.int64)[:, None] * outputs + columns[None, :]
    is_place = is_row[:, None] & (columns < outputs)[None, :]
    tl.store(out_ptr + out_places, total.to(out_ptr.dtype.element_ty), mask=is_place)


@cache
def _configuration(
    dtype: torch.dtype, has_bias: bool, tile: _GroupTile, block_experts: int
) -> Configuration:
    return Configuration(
        kernel=grouped_projection_kernel,
        signature={
            **dict.fromkeys(
                ("out_ptr", "hidden_ptr", "weight_ptr", "bias_ptr"), POINTER_TYPES[dtype]
            ),
            "order_ptr": "*i32:16",
            "starts_ptr": "*i32:16",
            "num_experts": "i32",
            "num_shared": "i32",
            "outputs": "i32:16",
            "inputs": "i32:16",
        },
        constexprs={
            "HAS_BIAS": has_bias,
            "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
            "BLOCK_E": block_experts,
            "BLOCK_M": tile.rows,
            "BLOCK_N": tile.outputs,
            "BLOCK_K": tile.input_bytes // dtype.itemsize,
        },
        num_warps=tile.num_warps,
        num_stages=2 if dtype == torch.float32 else tile.num_stages,
    )


def _configurations() -> Iterator[Configuration]:
    for tile in (_FEW, _MANY):
        for dtype in COMPILED_DTYPES:
            yield _configuration(dtype, True, tile, 128)
        yield _configuration(torch.bfloat16, False, tile, 512)


CONFIGURATIONS = tuple(_configurations())
