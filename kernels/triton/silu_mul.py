"""The gate of a gated linear unit with SiLU activation, in a single pass."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference.silu_mul import check_gate_up
from kernels.triton.configurations import (
    COMPILED_DTYPES,
    POINTER_TYPES,
    Configuration,
    has_pdl,
    launch,
    pdl_targets,
)

_BLOCK = 1024


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `kernels.reference.silu_mul`; rounds once. Reads 2 elements for each that it writes."""
    check_gate_up(gate_up)
    width = gate_up.shape[-1] // 2
    rows = gate_up.reshape(-1, 2 * width)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    shape = (*gate_up.shape[:-1], width)
    product = torch.empty(shape, dtype=gate_up.dtype, device=gate_up.device)
    if product.numel():
        grid = (rows.shape[0], triton.cdiv(width, _BLOCK))
        configuration = _configuration(gate_up.dtype, has_pdl(gate_up.device))
        launch(configuration, grid, product, rows, width, rows.stride(0))
    return product


@triton.jit
def silu_mul_kernel(
    product_ptr, gate_up_ptr, width, stride, BLOCK: tl.constexpr, HAS_PDL: tl.constexpr
):
    if HAS_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = columns < width
    places = gate_up_ptr + row * stride + columns
    gate = tl.load(places, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(places + width, mask=is_there, other=0.0).to(tl.float32)
    product = (gate * tl.sigmoid(gate) * up).to(product_ptr.dtype.element_ty)
    tl.store(product_ptr + row * width + columns, product, mask=is_there)


@cache
def _configuration(dtype: torch.dtype, uses_pdl: bool) -> Configuration:
    pointers = dict.fromkeys(("product_ptr", "gate_up_ptr"), POINTER_TYPES[dtype])
    return Configuration(
        kernel=silu_mul_kernel,
        signature={**pointers, "width": "i32:16", "stride": "i32:16"},
        constexprs={"BLOCK": _BLOCK, "HAS_PDL": uses_pdl},
        targets=pdl_targets(uses_pdl),
    )


CONFIGURATIONS = [
    _configuration(dtype, uses_pdl) for dtype in COMPILED_DTYPES for uses_pdl in (False, True)
]
