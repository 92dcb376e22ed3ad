"""Root mean square normalization of rows, with and without the preceding residual connection."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.shapes import check_shape
from kernels.triton.configurations import POINTER_TYPES, Configuration, launch

_BLOCK_ELEMENTS = 2048
"""Elements per program for shorter rows: narrow rows, such as heads of queries, share a program."""
_WIDTHS = (128, 16384)
"""The widths compiled ahead of time, rounded up to powers of two; registers hold float32 for any
dtype."""


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `kernels.reference.rms_norm`. Reads and writes each element once.

    Three-dimensional input may be strided, such as heads of a fused projection.
    """
    width = hidden.shape[-1]
    check_shape("weight", weight, (width,))
    rows = hidden if hidden.dim() == 3 else hidden.reshape(-1, 1, width)
    if rows.stride(2) != 1:
        rows = rows.contiguous()
    normed = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    configuration, block_rows = _configuration(hidden.dtype, triton.next_power_of_2(width))
    num_rows = rows.shape[0] * rows.shape[1]
    if num_rows:
        launch(
            configuration,
            (triton.cdiv(num_rows, block_rows),),
            normed,
            rows,
            weight.contiguous(),
            num_rows,
            rows.shape[1],
            rows.stride(0),
            rows.stride(1),
            width,
            eps,
        )
    return normed


@triton.jit
def normalize(values, weight, width, eps):
    """Normalize rows: ``values`` [rows, BLOCK_WIDTH] float32, 0 from ``width`` on."""
    mean_square = tl.sum(values * values, axis=1) / width
    return values * tl.rsqrt(mean_square + eps)[:, None] * weight.to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["num_rows", "num_inner"])
def rms_norm_kernel(
    normed_ptr,
    hidden_ptr,
    weight_ptr,
    num_rows,
    num_inner,
    outer_stride,
    inner_stride,
    width,
    eps,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_WIDTH)
    is_there = (rows < num_rows)[:, None] & (columns < width)[None, :]
    starts = (rows // num_inner).to(tl.int64) * outer_stride + rows % num_inner * inner_stride
    places = hidden_ptr + starts[:, None] + columns[None, :]
    values = tl.load(places, mask=is_there, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=columns < width, other=0.0)
    normed = normalize(values, weight, width, eps).to(normed_ptr.dtype.element_ty)
    outs = normed_ptr + rows.to(tl.int64)[:, None] * width + columns[None, :]
    tl.store(outs, normed, mask=is_there)


def num_warps(block_width: int) -> int:
    """At most 16 elements per thread, and at most 32 warps."""
    return min(32, max(4, block_width // 512))


@cache
def _configuration(dtype: torch.dtype, block_width: int) -> tuple[Configuration, int]:
    """The configuration, and the number of rows per program: both depend only on the width."""
    block_rows = max(1, _BLOCK_ELEMENTS // block_width)
    configuration = Configuration(
        kernel=rms_norm_kernel,
        signature={
            **dict.fromkeys(("normed_ptr", "hidden_ptr", "weight_ptr"), POINTER_TYPES[dtype]),
            "num_rows": "i32",
            "num_inner": "i32",
            **dict.fromkeys(("outer_stride", "inner_stride", "width"), "i32:16"),
            "eps": "fp32",
        },
        constexprs={"BLOCK_ROWS": block_rows, "BLOCK_WIDTH": block_width},
        num_warps=num_warps(block_width),
    )
    return configuration, block_rows


CONFIGURATIONS = [_configuration(torch.bfloat16, w)[0] for w in _WIDTHS]
