"""Reads weights in planes of codes and scales (`kernels.planes`): what their kernels share.

All inputs of a tile that are in the low halves of bytes are decoded together, and so are the inputs
in the high halves. No weight is exchanged between threads, and activations are loaded in the same
order.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
import triton
from torch import Tensor
from triton import language as tl

from kernels.planes import PlaneLayout, Planes
from kernels.triton.configurations import POINTER_TYPES

_CODE_BITS = tl.constexpr(0x4B000000)
"""The bits of 2**23, whose mantissa takes a code as an integer."""
_CODE_BASE = tl.constexpr(1 << 23)


@dataclass(frozen=True, slots=True)
class PlaneTile:
    """The tokens and outputs of a program, and the steps that it reads at a time."""

    tokens: int
    outputs: int
    steps: int
    num_warps: int = 4


class LayoutConstant(str):
    """A `PlaneLayout` as a constant of kernels, which has its attributes.

    It is a text, because Triton writes all constants as JSON while compilations are observed (see
    `kernels.triton.compilations`), and its cache distinguishes them by their text.
    """

    layout: PlaneLayout

    def __new__(cls, layout: PlaneLayout) -> Self:
        made = super().__new__(cls, repr(layout))
        made.layout = layout
        return made

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layout, name)


def plane_pointers(planes: Planes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The tensors as kernels read them: both numbers of a group or of a header are one word."""
    layout = planes.layout
    low, high, scales, headers = (tensor.contiguous() for tensor in planes.tensors)
    return (
        low,
        high,
        scales.view(torch.int16) if layout.scale_bytes == 2 else scales,
        headers.view(torch.int32) if layout.has_minima else headers,
    )


def plane_types(layout: PlaneLayout) -> dict[str, str]:
    """The types of the arguments of `plane_pointers`."""
    headers = POINTER_TYPES[torch.float16 if layout.header_groups else torch.float32]
    return {
        "low_ptr": "*u8:16",
        "high_ptr": "*u8:16",
        "scales_ptr": "*i16:16" if layout.scale_bytes == 2 else "*u8:16",
        "headers_ptr": "*i32:16" if layout.has_minima else headers,
    }


@triton.jit
def half_inputs(first, STEPS: tl.constexpr, HALF: tl.constexpr):
    """The inputs in the first (HALF = 0) or second halves of STEPS steps from step ``first`` on, in
    the order of `half_weights`: [32 * STEPS]."""
    places = tl.arange(0, 32 * STEPS)
    return (first + places // 32) * 64 + HALF * 32 + places % 32


@triton.jit
def _load_plane(ptr, rows, first, num_steps, STEPS: tl.constexpr, BYTES: tl.constexpr):
    """For each weight of half of the steps, the byte that it is in: [rows, 32 * STEPS]. Each byte
    is there as often as it has weights of the same half."""
    places = tl.arange(0, 32 * STEPS)
    steps = first + places // 32
    row_ptrs = ptr + rows[:, None] * (num_steps * BYTES)
    within = steps * BYTES + places % BYTES
    packed = tl.load(row_ptrs + within[None, :], mask=(steps < num_steps)[None, :], other=0)
    return packed.to(tl.int32)


@triton.jit
def _parts(packed, STEPS: tl.constexpr, BITS: tl.constexpr, HALF: tl.constexpr):
    """The bits of a plane in bytes [rows, 32 * STEPS]."""
    if BITS == 4:
        shifted = packed >> (4 * HALF)
    else:
        runs = tl.arange(0, 32 * STEPS) % 32 // (8 * BITS)
        shifted = packed >> (BITS * runs + 4 * HALF)[None, :]
    return shifted & ((1 << BITS) - 1)


@triton.jit
def _looked_up(codes, LAYOUT: tl.constexpr):
    """The bytes of the table at codes below 16."""
    lower = tl.where((codes & 4) != 0, LAYOUT.table_words[1], LAYOUT.table_words[0])
    upper = tl.where((codes & 4) != 0, LAYOUT.table_words[3], LAYOUT.table_words[2])
    return (tl.where((codes & 8) != 0, upper, lower) >> ((codes & 3) * 8)) & 255


@triton.jit
def _half_precision(bits):
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _group_scales(
    scales_ptr,
    headers_ptr,
    rows,
    first,
    num_steps,
    LAYOUT: tl.constexpr,
    STEPS: tl.constexpr,
    HALF: tl.constexpr,
):
    """The scales and minima of the groups in half of the steps, [rows, groups] float32. Without
    minima, the second result has no meaning."""
    GROUPS: tl.constexpr = 32 // LAYOUT.group
    places = tl.arange(0, STEPS * GROUPS)
    steps = first + places // GROUPS
    is_there = (steps < num_steps)[None, :]
    groups = (steps * 2 * GROUPS + HALF * GROUPS + places % GROUPS)[None, :]
    row_groups = num_steps * 2 * GROUPS
    scales = tl.zeros([rows.shape[0], STEPS * GROUPS], tl.float32)
    minima = scales
    if LAYOUT.header_size:
        if LAYOUT.header_groups:
            headers = rows[:, None] * (row_groups // LAYOUT.header_groups)
            headers += groups // LAYOUT.header_groups
        else:
            headers = rows[:, None] + groups * 0
        # Not 0, by which quotients would be divided.
        header = tl.load(headers_ptr + headers, mask=is_there, other=1)
        if LAYOUT.has_minima:
            scales = _half_precision(header)
            minima = _half_precision(header >> 16)
        else:
            scales = header.to(tl.float32)
    if LAYOUT.scale_bytes:
        stored = tl.load(scales_ptr + rows[:, None] * row_groups + groups, mask=is_there, other=0)
        if LAYOUT.scales == "int8":
            scales *= stored.to(tl.int8, bitcast=True).to(tl.float32)
        elif LAYOUT.scales == "bytes":
            scales *= (stored & 255).to(tl.float32)
            minima *= (stored >> 8).to(tl.float32)
        elif LAYOUT.scales == "nibbles":
            scales *= (stored & 15).to(tl.float32)
            minima *= (stored >> 4).to(tl.float32)
        elif LAYOUT.scales == "exponents":
            # The powers are halved, because the values are doubled. Two of them are subnormal.
            wide = stored.to(tl.int32)
            small = 0x200000 << tl.minimum(wide, 1)
            scales = tl.where(wide < 2, small, (wide - 1) << 23).to(tl.float32, bitcast=True)
        else:
            # The bits of half precision, whose exponents are larger by 8.
            wide = stored.to(tl.int32)
            floats = _half_precision(((wide & 0x80) << 8) | ((wide & 0x7F) << 7)) * 256.0
            scales = floats * scales if LAYOUT.scales == "factors" else floats / scales
    return scales, minima


@triton.jit
def _spread(values, GROUP: tl.constexpr):
    """[rows, groups] as [rows, inputs]."""
    ROWS: tl.constexpr = values.shape[0]
    GROUPS: tl.constexpr = values.shape[1]
    return values[:, :, None].broadcast_to(ROWS, GROUPS, GROUP).reshape(ROWS, GROUPS * GROUP)


@triton.jit
def half_weights(
    low,
    high,
    scales_ptr,
    headers_ptr,
    rows,
    first,
    num_steps,
    LAYOUT: tl.constexpr,
    STEPS: tl.constexpr,
    HALF: tl.constexpr,
):
    """The weights of half of the steps, [rows, 32 * STEPS] float32, from the bytes of both planes.
    Weights beyond the last step are finite."""
    codes = _parts(low, STEPS, LAYOUT.low_bits, HALF)
    if LAYOUT.high_bits:
        codes |= _parts(high, STEPS, LAYOUT.high_bits, HALF) << LAYOUT.low_bits
    if LAYOUT.table:
        codes = _looked_up(codes, LAYOUT)
    # Conversions of integers are slow.
    numbers = (codes | _CODE_BITS).to(tl.float32, bitcast=True) - (_CODE_BASE + LAYOUT.offset)
    scales, minima = _group_scales(
        scales_ptr, headers_ptr, rows, first, num_steps, LAYOUT, STEPS, HALF
    )
    weights = numbers * _spread(scales, LAYOUT.group)
    if LAYOUT.has_minima:
        weights -= _spread(minima, LAYOUT.group)
    return weights


@triton.jit
def load_planes(
    low_ptr, high_ptr, rows, first, num_steps, LAYOUT: tl.constexpr, STEPS: tl.constexpr
):
    """The bytes of both planes; those of the first twice if the layout has no second."""
    low = _load_plane(low_ptr, rows, first, num_steps, STEPS, LAYOUT.low_bytes)
    high = low
    if LAYOUT.high_bits:
        high = _load_plane(high_ptr, rows, first, num_steps, STEPS, LAYOUT.high_bytes)
    return low, high


@triton.jit
def plane_product(
    hidden_rows,
    planes,
    rows,
    inputs,
    num_steps,
    LAYOUT: tl.constexpr,
    PRECISION: tl.constexpr,
    STEPS: tl.constexpr,
):
    """The products of tokens, to whose first inputs ``hidden_rows`` [tokens] point, with the
    outputs ``rows`` of the planes low, high, scales and headers: [tokens, rows] float32."""
    low_ptr, high_ptr, scales_ptr, headers_ptr = planes
    dtype: tl.constexpr = hidden_rows.dtype.element_ty
    total = tl.zeros([hidden_rows.shape[0], rows.shape[0]], tl.float32)
    for first in tl.range(0, num_steps, STEPS):
        low, high = load_planes(low_ptr, high_ptr, rows, first, num_steps, LAYOUT, STEPS)
        for half in tl.static_range(2):
            read = half_inputs(first, STEPS, half)
            hidden = tl.load(
                hidden_rows[:, None] + read[None, :], mask=(read < inputs)[None, :], other=0.0
            )
            weights = half_weights(
                low, high, scales_ptr, headers_ptr, rows, first, num_steps, LAYOUT, STEPS, half
            )
            total = tl.dot(hidden, tl.trans(weights.to(dtype)), total, input_precision=PRECISION)
    return total
