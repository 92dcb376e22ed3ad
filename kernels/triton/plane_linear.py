"""A projection with weights in planes of codes and scales, which become floats in registers.

A weight is read in the bits that it is stored in, which limits the product for few tokens: a single
token is multiplied without tensor cores, by programs that read a few outputs each. For many tokens
the matrix is expanded to memory once.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import torch
import triton
from torch import Tensor
from torch.nn import functional
from triton import language as tl

from kernels.planes import LAYOUTS, PlaneLayout, Planes, check_planes
from kernels.triton.configurations import POINTER_TYPES, TARGETS, Configuration, launch
from kernels.triton.plane_weights import (
    LayoutConstant,
    PlaneTile,
    half_inputs,
    half_weights,
    load_planes,
    plane_pointers,
    plane_product,
    plane_types,
)

_TILES = (PlaneTile(16, 32, 2), PlaneTile(64, 64, 1, num_warps=8))
"""The first that has all tokens is used, or the last."""
_FLOAT32_TILE = PlaneTile(16, 32, 1)
"""Floats of 32 bits are multiplied without tensor cores, and larger tiles do not fit into the
registers."""
_VECTOR = PlaneTile(1, 8, 8)
_EXPANDED = PlaneTile(0, 16, 4)
_MAX_TILED_TOKENS = 256


def plane_linear(
    hidden: Tensor,
    planes: Planes,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    is_batch_invariant: bool = False,
) -> Tensor:
    """See `kernels.reference.plane_linear`. Weights are rounded to the dtype of ``hidden`` if there
    are several tokens.

    With ``is_batch_invariant`` a row's result is bit-identical whatever else is in the batch.
    """
    check_planes(hidden, planes, bias)
    num_tokens, outputs = len(hidden), planes.outputs
    dtype = out_dtype or hidden.dtype
    if num_tokens > _MAX_TILED_TOKENS and not is_batch_invariant:
        weight = expanded(planes, hidden.dtype)
        if dtype == hidden.dtype:
            return functional.linear(hidden, weight, bias)
        product = torch.mm(hidden, weight.t(), out_dtype=dtype)
        return product if bias is None else product + bias
    out = torch.empty(num_tokens, outputs, dtype=dtype, device=hidden.device)
    if not num_tokens:
        return out
    arguments = (
        out,
        hidden.contiguous(),
        *plane_pointers(planes),
        hidden if bias is None else bias.contiguous(),
    )
    sizes = (outputs, planes.inputs, planes.low.shape[1])
    types = (planes.format, hidden.dtype, dtype)
    if num_tokens == 1 and not is_batch_invariant:
        grid: tuple[int, ...] = (triton.cdiv(outputs, _VECTOR.outputs),)
        launch(_vector_configuration(*types, has_bias=bias is not None), grid, *arguments, *sizes)
        return out
    fitting = (one for one in _TILES if one.tokens >= num_tokens and not is_batch_invariant)
    tile = _FLOAT32_TILE if hidden.dtype == torch.float32 else next(fitting, _TILES[-1])
    grid = (triton.cdiv(num_tokens, tile.tokens), triton.cdiv(outputs, tile.outputs))
    configuration = _configuration(*types, tile, has_bias=bias is not None)
    launch(configuration, grid, *arguments, num_tokens, *sizes)
    return out


def expanded(planes: Planes, dtype: torch.dtype) -> Tensor:
    """The matrix as floats, [outputs, inputs]."""
    num_steps = planes.low.shape[1]
    weight = torch.empty(planes.outputs, planes.inputs, dtype=dtype, device=planes.low.device)
    launch(
        _expand_configuration(planes.format, dtype),
        (triton.cdiv(planes.outputs, _EXPANDED.outputs), triton.cdiv(num_steps, _EXPANDED.steps)),
        weight,
        *plane_pointers(planes),
        planes.outputs,
        planes.inputs,
        num_steps,
    )
    return weight


@triton.jit(do_not_specialize=["num_tokens", "outputs", "num_steps"])
def plane_linear_kernel(
    out_ptr,
    hidden_ptr,
    low_ptr,
    high_ptr,
    scales_ptr,
    headers_ptr,
    bias_ptr,
    num_tokens,
    outputs,
    inputs,
    num_steps,
    HAS_BIAS: tl.constexpr,
    LAYOUT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """A tile [BLOCK_TOKENS, BLOCK_OUTPUTS] per program."""
    tokens = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    outs = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    # Rows beyond the last row repeat it instead of masking; their results are not stored.
    rows = tl.minimum(outs, outputs - 1).to(tl.int64)
    hidden_rows = hidden_ptr + tl.minimum(tokens, num_tokens - 1).to(tl.int64) * inputs
    planes = (low_ptr, high_ptr, scales_ptr, headers_ptr)
    total = plane_product(hidden_rows, planes, rows, inputs, num_steps, LAYOUT, PRECISION, STEPS)
    if HAS_BIAS:
        total += tl.load(bias_ptr + rows).to(tl.float32)[None, :]
    places = tokens.to(tl.int64)[:, None] * outputs + outs[None, :]
    is_place = (tokens < num_tokens)[:, None] & (outs < outputs)[None, :]
    tl.store(out_ptr + places, total.to(out_ptr.dtype.element_ty), mask=is_place)


@triton.jit(do_not_specialize=["outputs", "num_steps"])
def plane_vector_kernel(
    out_ptr,
    hidden_ptr,
    low_ptr,
    high_ptr,
    scales_ptr,
    headers_ptr,
    bias_ptr,
    outputs,
    inputs,
    num_steps,
    HAS_BIAS: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """BLOCK_OUTPUTS outputs of a single token per program."""
    outs = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    rows = tl.minimum(outs, outputs - 1).to(tl.int64)
    sums = tl.zeros([BLOCK_OUTPUTS, 32 * STEPS], tl.float32)
    # Without a product of matrices, loads are only made in advance if the loop asks for it.
    for first in tl.range(0, num_steps, STEPS, num_stages=3):
        low, high = load_planes(low_ptr, high_ptr, rows, first, num_steps, LAYOUT, STEPS)
        for half in tl.static_range(2):
            read = half_inputs(first, STEPS, half)
            hidden = tl.load(hidden_ptr + read, mask=read < inputs, other=0.0).to(tl.float32)
            weights = half_weights(
                low, high, scales_ptr, headers_ptr, rows, first, num_steps, LAYOUT, STEPS, half
            )
            sums += weights * hidden[None, :]
    total = tl.sum(sums, axis=1)
    if HAS_BIAS:
        total += tl.load(bias_ptr + rows).to(tl.float32)
    tl.store(out_ptr + outs, total.to(out_ptr.dtype.element_ty), mask=outs < outputs)


@triton.jit(do_not_specialize=["outputs", "num_steps"])
def plane_expand_kernel(
    weight_ptr,
    low_ptr,
    high_ptr,
    scales_ptr,
    headers_ptr,
    outputs,
    inputs,
    num_steps,
    LAYOUT: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """The weights of BLOCK_OUTPUTS outputs in STEPS steps per program."""
    outs = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    rows = tl.minimum(outs, outputs - 1).to(tl.int64)
    first = tl.program_id(1) * STEPS
    low, high = load_planes(low_ptr, high_ptr, rows, first, num_steps, LAYOUT, STEPS)
    for half in tl.static_range(2):
        read = half_inputs(first, STEPS, half)
        weights = half_weights(
            low, high, scales_ptr, headers_ptr, rows, first, num_steps, LAYOUT, STEPS, half
        )
        is_place = (outs < outputs)[:, None] & (read < inputs)[None, :]
        places = weight_ptr + rows[:, None] * inputs + read[None, :]
        tl.store(places, weights.to(weight_ptr.dtype.element_ty), mask=is_place)


def _signature(layout: PlaneLayout, dtype: torch.dtype, out_dtype: torch.dtype) -> dict[str, str]:
    return {
        "out_ptr": POINTER_TYPES[out_dtype],
        "hidden_ptr": POINTER_TYPES[dtype],
        **plane_types(layout),
        "bias_ptr": POINTER_TYPES[dtype],
    }


_SIZES = {"outputs": "i32", "inputs": "i32:16", "num_steps": "i32"}


@cache
def _configuration(
    plane_format: str,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    tile: PlaneTile,
    *,
    has_bias: bool,
) -> Configuration:
    layout = LAYOUTS[plane_format]
    return Configuration(
        kernel=plane_linear_kernel,
        signature={**_signature(layout, dtype, out_dtype), "num_tokens": "i32", **_SIZES},
        constexprs={
            "HAS_BIAS": has_bias,
            "LAYOUT": LayoutConstant(layout),
            "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
            "BLOCK_TOKENS": tile.tokens,
            "BLOCK_OUTPUTS": tile.outputs,
            "STEPS": tile.steps,
        },
        num_warps=tile.num_warps,
        num_stages=2 if dtype == torch.float32 else 3,
    )


@cache
def _vector_configuration(
    plane_format: str, dtype: torch.dtype, out_dtype: torch.dtype, *, has_bias: bool
) -> Configuration:
    layout = LAYOUTS[plane_format]
    return Configuration(
        kernel=plane_vector_kernel,
        signature={**_signature(layout, dtype, out_dtype), **_SIZES},
        constexprs={
            "HAS_BIAS": has_bias,
            "LAYOUT": LayoutConstant(layout),
            "BLOCK_OUTPUTS": _VECTOR.outputs,
            "STEPS": _VECTOR.steps,
        },
    )


@cache
def _expand_configuration(plane_format: str, dtype: torch.dtype) -> Configuration:
    layout = LAYOUTS[plane_format]
    return Configuration(
        kernel=plane_expand_kernel,
        signature={"weight_ptr": POINTER_TYPES[dtype], **plane_types(layout), **_SIZES},
        constexprs={
            "LAYOUT": LayoutConstant(layout),
            "BLOCK_OUTPUTS": _EXPANDED.outputs,
            "STEPS": _EXPANDED.steps,
        },
    )


_EACH_WAY = ("q6_k", "q2_k", "mxfp4", "nvfp4"), ("q4_k", "q5_1", "q3_k")
"""Layouts with each way to read codes and scales, of several tokens and of one. The others are
compiled for one target: their code has the same parts."""


def _configurations() -> Iterator[Configuration]:
    """Each layout for several tokens and for one, and each tile."""
    dtype = torch.bfloat16
    for plane_format in LAYOUTS:
        of_layout = (
            _configuration(plane_format, dtype, dtype, _TILES[0], has_bias=True),
            _vector_configuration(plane_format, dtype, dtype, has_bias=True),
        )
        for configuration, each_way in zip(of_layout, _EACH_WAY, strict=True):
            targets = TARGETS if plane_format in each_way else (90,)
            yield replace(configuration, targets=targets)
    for plane_format in ("q4_k", "q6_k"):
        yield _configuration(plane_format, dtype, dtype, _TILES[1], has_bias=True)
    yield _configuration("q6_k", torch.float32, torch.float32, _FLOAT32_TILE, has_bias=True)
    yield _expand_configuration("q6_k", dtype)


CONFIGURATIONS = tuple(_configurations())
