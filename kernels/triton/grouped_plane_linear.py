"""Products with the matrices of experts, in planes of codes and scales.

Tiles are those of `kernels.triton.grouped_projection`, and weights are decoded as in
`kernels.triton.plane_linear`. Only the matrices of experts that have rows are read.
"""

from collections.abc import Iterator
from functools import cache

import torch
import triton
from torch import Tensor
from triton import language as tl

from kernels.planes import LAYOUTS, Planes, check_expert_planes
from kernels.triton.configurations import POINTER_TYPES, Configuration, launch
from kernels.triton.grouped_projection import most_tiles, tile_of_expert
from kernels.triton.plane_weights import (
    LayoutConstant,
    PlaneTile,
    plane_pointers,
    plane_product,
    plane_types,
)

_FEW = PlaneTile(16, 32, 2)
"""For experts with few rows each: the time to read the matrices is the limit."""
_MANY = PlaneTile(64, 64, 1, num_warps=8)
_FLOAT32_TILE = PlaneTile(16, 32, 1)
_FEW_ROWS = 16
"""The most rows of an expert, on average, for which the smaller tile is used."""


def grouped_plane_linear(
    hidden: Tensor,
    planes: Planes,
    bias: Tensor | None,
    order: Tensor,
    starts: Tensor,
    *,
    num_shared: int = 1,
    is_batch_invariant: bool = False,
) -> Tensor:
    """See `kernels.reference.grouped_plane_linear`; weights are rounded to the dtype of ``hidden``.

    With ``is_batch_invariant`` the tiles do not depend on the number of rows, so that a row's bits
    depend on its inputs alone.
    """
    check_expert_planes(hidden, planes, bias, order, starts, num_shared)
    num_rows, num_experts = len(order), len(starts) - 1
    outputs = planes.outputs // num_experts
    out = torch.empty(num_rows, outputs, dtype=hidden.dtype, device=hidden.device)
    if not num_rows:
        return out
    is_few = num_rows <= _FEW_ROWS * num_experts and not is_batch_invariant
    tile = _FEW if is_few else _MANY
    if hidden.dtype == torch.float32:
        tile = _FLOAT32_TILE
    num_tiles = most_tiles(num_rows, num_experts, tile.tokens)
    block_experts = int(triton.next_power_of_2(num_experts))
    launch(
        _configuration(planes.format, hidden.dtype, bias is not None, tile, block_experts),
        (triton.cdiv(outputs, tile.outputs), num_tiles),
        out,
        hidden.contiguous(),
        *plane_pointers(planes),
        hidden if bias is None else bias.contiguous(),
        order,
        starts,
        num_experts,
        num_shared,
        outputs,
        planes.inputs,
        planes.low.shape[1],
    )
    return out


@triton.jit(do_not_specialize=["num_experts", "num_shared", "outputs", "num_steps"])
def grouped_plane_linear_kernel(
    out_ptr,
    hidden_ptr,
    low_ptr,
    high_ptr,
    scales_ptr,
    headers_ptr,
    bias_ptr,
    order_ptr,
    starts_ptr,
    num_experts,
    num_shared,
    outputs,
    inputs,
    num_steps,
    HAS_BIAS: tl.constexpr,
    LAYOUT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEPS: tl.constexpr,
):
    """A tile of BLOCK_M rows of one expert by BLOCK_N outputs per program."""
    expert, first, end = tile_of_expert(starts_ptr, num_experts, BLOCK_E, BLOCK_M)
    if expert >= num_experts:
        return
    places = first + tl.arange(0, BLOCK_M)
    # Places beyond the last row repeat it instead of masking; their results are not stored.
    tokens = tl.load(order_ptr + tl.minimum(places, end - 1))
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = expert.to(tl.int64) * outputs + tl.minimum(columns, outputs - 1)
    hidden_rows = hidden_ptr + (tokens // num_shared).to(tl.int64) * inputs
    planes = (low_ptr, high_ptr, scales_ptr, headers_ptr)
    total = plane_product(hidden_rows, planes, rows, inputs, num_steps, LAYOUT, PRECISION, STEPS)
    if HAS_BIAS:
        total += tl.load(bias_ptr + rows).to(tl.float32)[None, :]
    out_places = tokens.to(tl.int64)[:, None] * outputs + columns[None, :]
    is_place = (places < end)[:, None] & (columns < outputs)[None, :]
    tl.store(out_ptr + out_places, total.to(out_ptr.dtype.element_ty), mask=is_place)


@cache
def _configuration(
    plane_format: str, dtype: torch.dtype, has_bias: bool, tile: PlaneTile, block_experts: int
) -> Configuration:
    layout, pointer = LAYOUTS[plane_format], POINTER_TYPES[dtype]
    return Configuration(
        kernel=grouped_plane_linear_kernel,
        signature={
            **dict.fromkeys(("out_ptr", "hidden_ptr"), pointer),
            **plane_types(layout),
            "bias_ptr": pointer,
            **dict.fromkeys(("order_ptr", "starts_ptr"), "*i32:16"),
            **dict.fromkeys(("num_experts", "num_shared", "outputs"), "i32"),
            "inputs": "i32:16",
            "num_steps": "i32",
        },
        constexprs={
            "HAS_BIAS": has_bias,
            "LAYOUT": LayoutConstant(layout),
            "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
            "BLOCK_E": block_experts,
            "BLOCK_M": tile.tokens,
            "BLOCK_N": tile.outputs,
            "STEPS": tile.steps,
        },
        num_warps=tile.num_warps,
        num_stages=2 if dtype == torch.float32 else 3,
    )


def _configurations() -> Iterator[Configuration]:
    yield _configuration("mxfp4", torch.bfloat16, True, _FEW, 128)
    yield _configuration("q4_k", torch.bfloat16, False, _MANY, 512)
    yield _configuration("q6_k", torch.float32, True, _FLOAT32_TILE, 128)


CONFIGURATIONS = tuple(_configurations())
