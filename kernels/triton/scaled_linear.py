"""A projection with weights of 8 bits, which become floats in registers.

Integers and 8-bit floats are numbers of the type of the inputs, so that a matrix instruction takes
them as they are; the sum of each block is scaled in float32. A weight is read in 8 bits, which
limits the product for few tokens. For many tokens the matrix is expanded to memory once.
"""

from collections.abc import Iterator
from functools import cache

import torch
import triton
from torch import Tensor
from torch.nn import functional
from triton import language as tl

from kernels.scaled_layout import check_scaled, dequantize_scaled, step_inputs
from kernels.triton.configurations import POINTER_TYPES, Configuration, launch

_TILES = ((16, 32), (64, 64))
"""(tokens, outputs) of a tile: the first that has all tokens, or the last."""
_FLOAT32_TILES = _TILES[:1]
_FLOAT32_STEP = 32
"""Floats of 32 bits are multiplied without tensor cores, and larger tiles do not fit into the
registers. The number of inputs divides all others."""
_MAX_TILED_TOKENS = 256
_KINDS = {torch.int8: "int8", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


def scaled_linear(
    hidden: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    *,
    block: tuple[int, int],
    is_batch_invariant: bool = False,
) -> Tensor:
    """See `kernels.reference.scaled_linear`.

    With ``is_batch_invariant`` a row's result is bit-identical whatever else is in the batch.
    """
    check_scaled(hidden, codes, scales, bias, block)
    num_tokens, inputs = hidden.shape
    if num_tokens > _MAX_TILED_TOKENS and not is_batch_invariant:
        weight = dequantize_scaled(codes, scales, block).to(hidden.dtype)
        return functional.linear(hidden, weight, bias)
    outputs = codes.shape[0]
    out = torch.empty(num_tokens, outputs, dtype=hidden.dtype, device=hidden.device)
    if not num_tokens:
        return out
    tiles = _FLOAT32_TILES if hidden.dtype == torch.float32 else _TILES
    fitting = (tile for tile in tiles if tile[0] >= num_tokens and not is_batch_invariant)
    tile = next(fitting, tiles[-1])
    step = step_inputs(inputs, block[1])
    assert step is not None
    if hidden.dtype == torch.float32:
        step = _FLOAT32_STEP
    launch(
        _configuration(hidden.dtype, _KINDS[codes.dtype], tile, step, has_bias=bias is not None),
        (triton.cdiv(num_tokens, tile[0]), triton.cdiv(outputs, tile[1])),
        out,
        hidden.contiguous(),
        codes.contiguous().view(torch.uint8),
        scales.contiguous(),
        hidden if bias is None else bias.contiguous(),
        num_tokens,
        outputs,
        inputs,
        scales.shape[1],
        *block,
    )
    return out


@triton.jit
def _numbers(codes, KIND: tl.constexpr, dtype: tl.constexpr):
    """The numbers that 8 bits stand for; none of them is rounded."""
    if KIND == "int8":
        return codes.to(tl.int8, bitcast=True).to(dtype)
    wide = codes.to(tl.int16)
    if KIND == "e5m2":
        return (wide << 8).to(tl.float16, bitcast=True).to(dtype)
    # The bits of half precision, whose exponents are larger by 8.
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return (bits.to(tl.float16, bitcast=True) * 256.0).to(dtype)


@triton.jit(do_not_specialize=["num_tokens", "columns", "block_outputs", "block_inputs"])
def scaled_linear_kernel(
    out_ptr,
    hidden_ptr,
    codes_ptr,
    scales_ptr,
    bias_ptr,
    num_tokens,
    outputs,
    inputs,
    columns,
    block_outputs,
    block_inputs,
    HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
):
    """A tile [BLOCK_TOKENS, BLOCK_OUTPUTS] per program. A scale is that of ``block_outputs`` times
    ``block_inputs`` numbers, and BLOCK_INPUTS divides the second unless there is one column."""
    dtype: tl.constexpr = hidden_ptr.dtype.element_ty
    tokens = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    outs = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    # Rows beyond the last row repeat it instead of masking; their results are not stored.
    loaded_outs = tl.minimum(outs, outputs - 1)
    hidden = hidden_ptr + tl.minimum(tokens, num_tokens - 1).to(tl.int64)[:, None] * inputs
    codes = codes_ptr + loaded_outs.to(tl.int64)[None, :] * inputs
    scales = scales_ptr + loaded_outs // block_outputs * columns
    steps = tl.arange(0, BLOCK_INPUTS)
    total = tl.zeros([BLOCK_TOKENS, BLOCK_OUTPUTS], tl.float32)
    for first in tl.range(0, inputs, BLOCK_INPUTS):
        is_input = first + steps < inputs
        left = tl.load(hidden + (first + steps)[None, :], mask=is_input[None, :], other=0.0)
        stored = tl.load(codes + (first + steps)[:, None], mask=is_input[:, None], other=0)
        product = tl.dot(left, _numbers(stored, KIND, dtype), input_precision=PRECISION)
        total += product * tl.load(scales + first // block_inputs)[None, :]
    if HAS_BIAS:
        total += tl.load(bias_ptr + loaded_outs).to(tl.float32)[None, :]
    places = tokens.to(tl.int64)[:, None] * outputs + outs[None, :]
    is_place = (tokens < num_tokens)[:, None] & (outs < outputs)[None, :]
    tl.store(out_ptr + places, total.to(dtype), mask=is_place)


@cache
def _configuration(
    dtype: torch.dtype, kind: str, tile: tuple[int, int], step: int, *, has_bias: bool
) -> Configuration:
    return Configuration(
        kernel=scaled_linear_kernel,
        signature={
            **dict.fromkeys(("out_ptr", "hidden_ptr"), POINTER_TYPES[dtype]),
            "codes_ptr": "*u8:16",
            "scales_ptr": POINTER_TYPES[torch.float32],
            "bias_ptr": POINTER_TYPES[dtype],
            "num_tokens": "i32",
            "outputs": "i32:16",
            "inputs": "i32:16",
            **dict.fromkeys(("columns", "block_outputs", "block_inputs"), "i32"),
        },
        constexprs={
            "HAS_BIAS": has_bias,
            "KIND": kind,
            "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
            "BLOCK_TOKENS": tile[0],
            "BLOCK_OUTPUTS": tile[1],
            "BLOCK_INPUTS": step,
        },
        num_stages=2 if dtype == torch.float32 else 3,
    )


def _configurations() -> Iterator[Configuration]:
    for kind in _KINDS.values():
        for tile in _TILES:
            yield _configuration(torch.bfloat16, kind, tile, 128, has_bias=True)
        yield _configuration(torch.bfloat16, kind, _TILES[0], _FLOAT32_STEP, has_bias=True)
        yield _configuration(torch.float32, kind, _FLOAT32_TILES[0], _FLOAT32_STEP, has_bias=True)


CONFIGURATIONS = tuple(_configurations())
