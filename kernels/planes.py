"""Matrices of codes of 2 to 6 bits as a GPU multiplies them: aligned planes of codes and scales.

A layout has the values of a format of ggml, or of NVFP4, in as many bytes but for 4 % at most. A
weight is scale * (code - offset) - minimum, computed in float32, or scale * value[code].

Inputs are divided into steps of 64, of which the last is filled up with zeros. A code is divided
into planes of 4, 2 or 1 bits. In a plane of b bits a step has 8 b bytes. Input 32 h + j of the step
is in byte j % 8 b, at bit b * (j // 8 b) + 4 h: the first half of a step is in the low halves of
bytes, and the second half in the high halves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kernels.shapes import check_shape

STEP = 64
"""The inputs of a step."""
HALF = STEP // 2
ScaleKind = Literal["headers", "int8", "bytes", "nibbles", "exponents", "factors", "quotients"]
"""What a group of inputs has for its scale, beside the header that it shares with other groups.

headers: nothing. int8, bytes: a factor; bytes have a second one for the minimum. nibbles: both in
a byte, the minimum in the high half. exponents: the exponent of a power of two, and no header.
factors, quotients: a float of 8 bits (e4m3), which the header multiplies or divides."""


@dataclass(frozen=True, slots=True)
class PlaneLayout:
    """The planes of a format, which kernels are compiled for."""

    low_bits: int
    """Of the codes, in the first plane: 4 or 2."""
    high_bits: int = 0
    """Of the codes, in the second plane: 0, 1 or 2."""
    group: int = 32
    """The inputs that share a scale: 16 or 32."""
    header_groups: int = 1
    """The groups that share a header; 0: all groups of an output."""
    scales: ScaleKind = "headers"
    has_minima: bool = False
    """Whether a header has a second number, for the minimum."""
    offset: int = 0
    """Subtracted from codes, or from the values in ``table``."""
    table: int = 0
    """The values of the 16 codes in a byte each, the lowest first; 0: codes are values."""

    @property
    def low_bytes(self) -> int:
        """Of a step in the first plane."""
        return self.low_bits * STEP // 8

    @property
    def high_bytes(self) -> int:
        """Of a step in the second plane."""
        return self.high_bits * STEP // 8

    @property
    def step_groups(self) -> int:
        """The groups of a step."""
        return STEP // self.group

    @property
    def scale_bytes(self) -> int:
        """Of a group, beside its header."""
        return {"headers": 0, "bytes": 2}.get(self.scales, 1)

    @property
    def header_size(self) -> int:
        """The numbers of a header."""
        return 0 if self.scales == "exponents" else 1 + self.has_minima

    @property
    def table_words(self) -> tuple[int, ...]:
        """``table`` in four signed numbers of 32 bits, the lowest first."""
        words = (self.table >> shift & (1 << 32) - 1 for shift in range(0, 128, 32))
        return tuple(_signed(word, 32) for word in words)

    @property
    def bytes_per_weight(self) -> float:
        """Without headers of whole outputs."""
        headers = 2 * self.header_size / self.header_groups if self.header_groups else 0
        return (self.low_bits + self.high_bits) / 8 + (self.scale_bytes + headers) / self.group


def _table(values: Sequence[int], offset: int) -> int:
    return int.from_bytes(bytes(value + offset for value in values), "little")


_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_DOUBLED_FLOAT4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_OF_IQ4 = PlaneLayout(4, offset=128, table=_table(_IQ4, 128))
_OF_FLOAT4 = PlaneLayout(4, offset=128, table=_table(_DOUBLED_FLOAT4, 128))
_OF_NVFP4 = replace(_OF_FLOAT4, group=16, header_groups=0, scales="factors")
LAYOUTS: Mapping[str, PlaneLayout] = {
    "q4_0": PlaneLayout(4, offset=8),
    "q4_1": PlaneLayout(4, has_minima=True),
    "q5_0": PlaneLayout(4, 1, offset=16),
    "q5_1": PlaneLayout(4, 1, has_minima=True),
    "q2_k": PlaneLayout(2, group=16, header_groups=16, scales="nibbles", has_minima=True),
    "q3_k": PlaneLayout(2, 1, group=16, header_groups=16, scales="int8", offset=4),
    "q4_k": PlaneLayout(4, header_groups=8, scales="bytes", has_minima=True),
    "q5_k": PlaneLayout(4, 1, header_groups=8, scales="bytes", has_minima=True),
    "q6_k": PlaneLayout(4, 2, group=16, header_groups=16, scales="int8", offset=32),
    "iq4_nl": _OF_IQ4,
    "iq4_xs": replace(_OF_IQ4, header_groups=8, scales="int8"),
    "mxfp4": replace(_OF_FLOAT4, scales="exponents"),
    "nvfp4": _OF_NVFP4,
    "nvfp4 quotients": replace(_OF_NVFP4, scales="quotients"),
}
"""By the names of ggml's formats; NVFP4 also with the scales of compressed-tensors."""


@dataclass(frozen=True, slots=True)
class Planes:
    """A matrix [outputs, inputs]. A part that the layout lacks is empty.

    The outputs are the first dimension of everything, so that outputs can be selected, and
    matrices stacked.
    """

    format: str
    """A key of `LAYOUTS`."""
    inputs: int
    low: Tensor
    """[outputs, steps, low_bytes] uint8."""
    high: Tensor
    """[outputs, steps, high_bytes] uint8."""
    scales: Tensor
    """[outputs, groups, scale_bytes] uint8, whatever the kind."""
    headers: Tensor
    """[outputs, headers, header_size]: float16, or float32 if outputs have one header each."""

    def __post_init__(self) -> None:
        layout, outputs, num_steps = self.layout, len(self.low), -(-self.inputs // STEP)
        groups = num_steps * layout.step_groups
        headers = groups // layout.header_groups if layout.header_groups else 1
        check_shape("low", self.low, (outputs, num_steps, layout.low_bytes))
        check_shape("high", self.high, (outputs, num_steps, layout.high_bytes))
        check_shape("scales", self.scales, (outputs, groups, layout.scale_bytes))
        check_shape("headers", self.headers, (outputs, headers, layout.header_size))
        expected = torch.float16 if layout.header_groups else torch.float32
        if self.headers.dtype != expected:
            raise ValueError(f"headers are {self.headers.dtype}, expected {expected}")

    @property
    def layout(self) -> PlaneLayout:
        return LAYOUTS[self.format]

    @property
    def outputs(self) -> int:
        return len(self.low)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.low, self.high, self.scales, self.headers

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def rows(self, index: Tensor | slice) -> "Planes":
        """The outputs selected by ``index``, a slice or [any] int64."""
        return Planes(self.format, self.inputs, *(tensor[index] for tensor in self.tensors))


def packed_planes(
    plane_format: str, codes: Tensor, scales: Tensor | None, headers: Tensor | None
) -> Planes:
    """Planes of codes [outputs, inputs] uint8, scales [outputs, groups, scale_bytes] of 8 bits and
    headers [outputs, headers, header_size]; None for what the layout lacks."""
    layout, (outputs, inputs) = LAYOUTS[plane_format], codes.shape
    num_steps = -(-inputs // STEP)
    groups = num_steps * layout.step_groups
    filled = _filled(codes, num_steps * STEP).view(outputs, num_steps, 2, HALF)
    none = codes.new_empty(outputs, groups, 0)
    if headers is None:
        headers = none[:, : groups // max(1, layout.header_groups)].half()
    elif layout.header_groups:
        headers = _filled(headers, groups // layout.header_groups)
    return Planes(
        plane_format,
        inputs,
        _plane(filled & (1 << layout.low_bits) - 1, layout.low_bits),
        _plane(filled >> layout.low_bits, layout.high_bits),
        none if scales is None else _filled(scales.view(torch.uint8), groups),
        headers.contiguous(),
    )


def joined_planes(parts: Sequence[Planes]) -> Planes:
    """The outputs of matrices of the same format, one after another."""
    tensors = (torch.cat(same) for same in zip(*(part.tensors for part in parts), strict=True))
    return Planes(parts[0].format, parts[0].inputs, *tensors)


def dequantize_planes(planes: Planes) -> Tensor:
    """[outputs, inputs] float32. Needs no constants that would have to be copied to the device, so
    that a CUDA graph can record it."""
    layout = planes.layout
    numbers = _values(_codes(planes), layout)
    scales, minima = _group_scales(planes)
    grouped = numbers.view(*scales.shape, layout.group) * scales.unsqueeze(-1)
    if minima is not None:
        grouped -= minima.unsqueeze(-1)
    return grouped.flatten(1)[:, : planes.inputs]


def check_planes(hidden: Tensor, planes: Planes, bias: Tensor | None) -> None:
    """Raise `ValueError` if shapes do not match."""
    check_shape("hidden", hidden, (None, planes.inputs))
    if bias is not None:
        check_shape("bias", bias, (planes.outputs,))


def check_expert_planes(
    hidden: Tensor,
    planes: Planes,
    bias: Tensor | None,
    order: Tensor,
    starts: Tensor,
    num_shared: int,
) -> None:
    """Raise `ValueError` if shapes do not match, or outputs are not those of as many experts."""
    num_experts = len(starts) - 1
    check_shape("hidden", hidden, (len(order) // num_shared, planes.inputs))
    if planes.outputs % num_experts:
        raise ValueError(f"{planes.outputs} outputs of {num_experts} experts")
    if bias is not None:
        check_shape("bias", bias, (num_experts, planes.outputs // num_experts))


def _filled(numbers: Tensor, length: int) -> Tensor:
    """Numbers [outputs, length or less, ...], filled up with zeros."""
    missing = length - numbers.shape[1]
    if not missing:
        return numbers
    zeros = numbers.new_zeros(len(numbers), missing, *numbers.shape[2:])
    return torch.cat((numbers, zeros), dim=1)


def _plane(parts: Tensor, bits: int) -> Tensor:
    """Parts of codes of so many bits, [outputs, steps, 2, 32] uint8, in their bytes."""
    outputs, num_steps = parts.shape[:2]
    packed = parts.new_zeros(outputs, num_steps, bits * STEP // 8)
    for half in range(2) if bits else ():
        runs = parts[:, :, half].view(outputs, num_steps, -1, packed.shape[2])
        for run in range(runs.shape[2]):
            packed |= runs[:, :, run] << (bits * run + 4 * half)
    return packed


def _codes(planes: Planes) -> Tensor:
    """[outputs, filled inputs] uint8."""
    layout, (outputs, num_steps, _) = planes.layout, planes.low.shape
    codes = planes.low.new_zeros(outputs, num_steps, 2, HALF)
    for packed, bits, place in (
        (planes.low, layout.low_bits, 0),
        (planes.high, layout.high_bits, layout.low_bits),
    ):
        for half in range(2) if bits else ():
            runs = codes[:, :, half].view(outputs, num_steps, -1, packed.shape[2])
            for run in range(runs.shape[2]):
                part = packed >> (bits * run + 4 * half) & (1 << bits) - 1
                runs[:, :, run] |= part << place
    return codes.flatten(1)


def _values(codes: Tensor, layout: PlaneLayout) -> Tensor:
    if not layout.table:
        return codes.float() - layout.offset
    low, high = (_signed(layout.table >> shift & (1 << 64) - 1, 64) for shift in (0, 64))
    words = torch.where(codes >= 8, high, low)
    return (words >> (codes & 7) * 8 & 255).float() - layout.offset


def _signed(word: int, bits: int) -> int:
    """So many bits as a signed number."""
    return word - (word >> bits - 1 << bits)


def _group_scales(planes: Planes) -> tuple[Tensor, Tensor | None]:
    """The scales, and minima if there are any, of all groups: [outputs, groups] float32."""
    layout, stored = planes.layout, planes.scales
    if layout.scales == "exponents":
        exponents = stored[:, :, 0].int()
        # The powers are halved, because the values are doubled. Two of them are subnormal.
        bits = torch.where(exponents < 2, 0x200000 << exponents.clamp(max=1), exponents - 1 << 23)
        return bits.view(torch.float32), None
    each = stored.shape[1] if not layout.header_groups else layout.header_groups
    headers = planes.headers.float().repeat_interleave(each, 1)
    scales = headers[:, :, 0]
    minima = headers[:, :, 1] if layout.has_minima else None
    if layout.scales in ("factors", "quotients"):
        floats = stored.view(torch.float8_e4m3fn)[:, :, 0].float()
        return (floats * scales if layout.scales == "factors" else floats / scales), None
    if layout.scales == "int8":
        return stored.view(torch.int8)[:, :, 0].float() * scales, minima
    if layout.scales == "headers":
        return scales, minima
    least, most = (
        (stored[:, :, 0], stored[:, :, 1])
        if layout.scales == "bytes"
        else (stored[:, :, 0] & 15, stored[:, :, 0] >> 4)
    )
    assert minima is not None
    return least.float() * scales, most.float() * minima
