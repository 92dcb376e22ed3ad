"""The residual connection fused with the normalization that follows it, in a single pass."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.shapes import check_shape
from kernels.triton.configurations import (
    POINTER_TYPES,
    Configuration,
    has_pdl,
    launch,
    pdl_targets,
)
from kernels.triton.rms_norm import normalize, num_warps

_WIDTHS = (4096, 16384)
"""The widths compiled ahead of time, rounded up to powers of two; registers hold float32 for any
dtype."""


def add_rms_norm(
    hidden: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See `kernels.reference.add_rms_norm`. Reads and overwrites each input once."""
    check_shape("residual", residual, hidden.shape)
    num_rows, width = hidden.shape
    check_shape("weight", weight, (width,))
    normed, total = hidden.contiguous(), residual.contiguous()
    if num_rows:
        block_width = triton.next_power_of_2(width)
        configuration = _configuration(hidden.dtype, block_width, has_pdl(hidden.device))
        launch(configuration, (num_rows,), normed, total, weight.contiguous(), width, eps)
    return normed, total


@triton.jit
def add_rms_norm_kernel(
    hidden_ptr,
    residual_ptr,
    weight_ptr,
    width,
    eps,
    BLOCK_WIDTH: tl.constexpr,
    HAS_PDL: tl.constexpr,
):
    if HAS_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    columns = tl.arange(0, BLOCK_WIDTH)
    is_there = columns < width
    places = tl.program_id(0).to(tl.int64) * width + columns
    hidden = tl.load(hidden_ptr + places, mask=is_there, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + places, mask=is_there, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=is_there, other=0.0)
    total = (hidden + residual).to(residual_ptr.dtype.element_ty)
    tl.store(residual_ptr + places, total, mask=is_there)
    # The stored, rounded sum, so that adding and then normalizing separately gives the same result.
    normed = normalize(total.to(tl.float32)[None, :], weight, width, eps)
    normed = tl.reshape(normed, (BLOCK_WIDTH,)).to(hidden_ptr.dtype.element_ty)
    tl.store(hidden_ptr + places, normed, mask=is_there)


@cache
def _configuration(dtype: torch.dtype, block_width: int, uses_pdl: bool) -> Configuration:
    pointers = dict.fromkeys(("hidden_ptr", "residual_ptr", "weight_ptr"), POINTER_TYPES[dtype])
    return Configuration(
        kernel=add_rms_norm_kernel,
        signature={**pointers, "width": "i32:16", "eps": "fp32"},
        constexprs={"BLOCK_WIDTH": block_width, "HAS_PDL": uses_pdl},
        num_warps=num_warps(block_width),
        targets=pdl_targets(uses_pdl),
    )


CONFIGURATIONS = [
    _configuration(torch.bfloat16, width, uses_pdl)
    for width in _WIDTHS
    for uses_pdl in (False, True)
]
