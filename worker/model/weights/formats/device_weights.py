"""Matrices that a GPU multiplies as codes with scales."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from kernels.awq_layout import CHUNK_INPUTS, can_be_packed, dequantize_awq, pack_awq
from kernels.block_planes import PLANE_BLOCKS, block_planes
from kernels.native.packed import Rows
from kernels.planes import LAYOUTS, Planes, dequantize_planes, joined_planes
from kernels.providers import Ops, Provider
from kernels.quantized import QuantizedWeight
from kernels.scaled_layout import dequantize_scaled, step_inputs
from worker.model.weights.weight import StackedWeight, Weight

_BYTES = {4: 0.6, 8: 1.13}
"""The memory for a weight whose code has so many bits, with scales for groups of 32 inputs."""
_BLOCK = (1, 32)
"""The outputs and inputs that share a scale in ggml's blocks of integers."""
_MIDDLE = 8
"""The zero point of codes below 16 that have none of their own."""


class Codes(NamedTuple):
    """A matrix (numbers - zeros) * scales."""

    numbers: Tensor
    """[outputs, inputs]: uint8 below 16, int8, float8_e4m3fn or float8_e5m2."""
    scales: Tensor
    """A number for each block, [rows, columns]."""
    block: tuple[int, int]
    """The outputs and inputs of a block."""
    zeros: Tensor | None = None
    """uint8 like the scales, for numbers below 16: 8 if there are none."""


DeviceMatrix: TypeAlias = Codes | Planes
"""A matrix that a GPU may multiply."""


@dataclass(frozen=True, slots=True)
class AwqWeight:
    """A `Weight` in the layout of `kernels.reference.awq_linear`."""

    providers: ClassVar[frozenset[Provider]] = frozenset({"triton"})
    qweight: Tensor
    scales: Tensor
    zeros: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.qweight.shape[1], self.qweight.shape[0] * CHUNK_INPUTS

    @property
    def num_bytes(self) -> int:
        return self.qweight.nbytes + self.scales.nbytes + self.zeros.nbytes

    @property
    def group_size(self) -> int:
        """The number of inputs that share a scale and a zero point."""
        return self.qweight.shape[0] * CHUNK_INPUTS // self.scales.shape[0]

    def linear(self, hidden: Tensor, bias: Tensor | None, ops: Ops) -> Tensor:
        return ops.awq_linear(
            hidden, self.qweight, self.scales, self.zeros, bias, group_size=self.group_size
        )

    def rows(self, ids: Tensor) -> Tensor:
        return self.dense(torch.float32)[ids]

    def selected(self, ids: Tensor) -> "AwqWeight":
        return AwqWeight(self.qweight[:, ids], self.scales[:, ids], self.zeros[:, ids])

    def dense(self, dtype: torch.dtype) -> Tensor:
        transposed = dequantize_awq(self.qweight, self.scales, self.zeros)
        return transposed.to(dtype).t().contiguous()

    def native_rows(self) -> Sequence[Rows]:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """A `Weight` in the layout of `kernels.reference.scaled_linear`."""

    providers: ClassVar[frozenset[Provider]] = frozenset({"triton"})
    codes: Tensor
    scales: Tensor
    block: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def linear(self, hidden: Tensor, bias: Tensor | None, ops: Ops) -> Tensor:
        return ops.scaled_linear(hidden, self.codes, self.scales, bias, block=self.block)

    def rows(self, ids: Tensor) -> Tensor:
        return self.selected(ids).dense(torch.float32)

    def selected(self, ids: Tensor) -> "ScaledWeight":
        """With scales for each output, because neighbours may have been apart."""
        codes = self.codes.view(torch.uint8)[ids].view(self.codes.dtype)
        return ScaledWeight(codes, self.scales[ids // self.block[0]], (1, self.block[1]))

    def dense(self, dtype: torch.dtype) -> Tensor:
        return dequantize_scaled(self.codes, self.scales, self.block).to(dtype)

    def native_rows(self) -> Sequence[Rows]:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class PlaneWeight:
    """A `Weight` in the layout of `kernels.reference.plane_linear`."""

    providers: ClassVar[frozenset[Provider]] = frozenset({"triton"})
    planes: Planes

    @property
    def shape(self) -> tuple[int, int]:
        return self.planes.outputs, self.planes.inputs

    @property
    def num_bytes(self) -> int:
        return self.planes.num_bytes

    def linear(self, hidden: Tensor, bias: Tensor | None, ops: Ops) -> Tensor:
        return ops.plane_linear(hidden, self.planes, bias)

    def rows(self, ids: Tensor) -> Tensor:
        return self.selected(ids).dense(torch.float32)

    def selected(self, ids: Tensor) -> "PlaneWeight":
        return PlaneWeight(self.planes.rows(ids))

    def dense(self, dtype: torch.dtype) -> Tensor:
        return dequantize_planes(self.planes).to(dtype)

    def native_rows(self) -> Sequence[Rows]:
        raise NotImplementedError


def on_device(parts: Sequence[DeviceMatrix]) -> Weight | None:
    """The outputs of several matrices in a row, in layouts that a GPU multiplies; None if there is
    none for the blocks of a matrix."""
    weights = [_weight(list(run)) for _, run in groupby(parts, _kind)]
    found = tuple(weight for weight in weights if weight is not None)
    if len(found) < len(weights):
        return None
    return found[0] if len(found) == 1 else StackedWeight(found)


def _kind(part: DeviceMatrix) -> tuple[object, ...]:
    """What matrices have in common that become one."""
    if isinstance(part, Planes):
        return (part.format,)
    return part.numbers.dtype, part.block[1], part.zeros is None


def _weight(run: Sequence[DeviceMatrix]) -> Weight | None:
    """Matrices of the same kind as a single matrix."""
    planes = [part for part in run if isinstance(part, Planes)]
    if planes:
        return PlaneWeight(planes[0] if len(planes) == 1 else joined_planes(planes))
    return _of_codes(_joined([part for part in run if isinstance(part, Codes)]))


def _of_codes(codes: Codes) -> Weight | None:
    inputs, size = codes.numbers.shape[1], codes.block[1]
    if codes.numbers.dtype != torch.uint8:
        if step_inputs(inputs, size) is None:
            return None
        return ScaledWeight(codes.numbers.contiguous(), codes.scales.float(), codes.block)
    if not _has_words(inputs, codes.block):
        return None
    scales = codes.scales.t().contiguous()
    zeros = (
        torch.full_like(scales, _MIDDLE, dtype=torch.uint8)
        if codes.zeros is None
        else codes.zeros.t().contiguous()
    )
    return AwqWeight(pack_awq(codes.numbers.t().contiguous()), scales, zeros)


def of_blocks(packed: QuantizedWeight) -> DeviceMatrix | None:
    """A matrix in ggml's blocks; None if a GPU multiplies no such blocks."""
    read = _OF_BLOCKS.get(packed.format)
    _, inputs = packed.shape
    if packed.format in PLANE_BLOCKS and not (read and can_be_packed(inputs, inputs // _BLOCK[1])):
        return block_planes(packed)
    return None if read is None else read(packed.blocks)


def _of_q8_0(blocks: Tensor) -> Codes:
    numbers = blocks[:, :, 2:].contiguous().view(torch.int8)
    return Codes(numbers.flatten(1), _scales(blocks), _BLOCK)


def _of_q4_0(blocks: Tensor) -> Codes:
    both = blocks[:, :, 2:]
    return Codes(torch.cat((both & 15, both >> 4), dim=2).flatten(1), _scales(blocks), _BLOCK)


def _scales(blocks: Tensor) -> Tensor:
    return blocks[:, :, :2].contiguous().view(torch.float16).flatten(1)


_OF_BLOCKS: Mapping[str, Callable[[Tensor], Codes]] = {"q8_0": _of_q8_0, "q4_0": _of_q4_0}
DEVICE_BLOCKS: Mapping[str, float] = {
    **{name: LAYOUTS[name].bytes_per_weight for name in PLANE_BLOCKS},
    "q8_0": _BYTES[8],
    "q4_0": _BYTES[4],
}
"""The formats of ggml's blocks that a GPU multiplies, and the bytes of a weight there."""


def bytes_on_device(inputs: int, bits: int, block: tuple[int, int]) -> float | None:
    """The memory for a weight of a matrix with codes of so many bits, and a scale for each block of
    outputs and inputs; None if it would be expanded."""
    has_layout = (
        _has_words(inputs, block) if bits < 8 else step_inputs(inputs, block[1]) is not None
    )
    return _BYTES[bits] if has_layout else None


def _has_words(inputs: int, block: tuple[int, int]) -> bool:
    """Whether there is an `AwqWeight` with such blocks."""
    outputs, size = block
    return outputs == 1 and inputs % size == 0 and can_be_packed(inputs, inputs // size)


def _joined(parts: Sequence[Codes]) -> Codes:
    """The outputs of several matrices in a row, whose numbers and blocks of inputs are alike."""
    heights = {part.block[0] for part in parts}
    if len(heights) > 1 or any(len(part.numbers) % part.block[0] for part in parts[:-1]):
        parts = [_with_scales_for_each_output(part) for part in parts]
    numbers = torch.cat([part.numbers.view(torch.uint8) for part in parts])
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return Codes(
        numbers.view(parts[0].numbers.dtype),
        torch.cat([part.scales for part in parts]),
        parts[0].block,
        torch.cat(zeros) if zeros else None,
    )


def _with_scales_for_each_output(codes: Codes) -> Codes:
    outputs, (height, size) = len(codes.numbers), codes.block
    scales = codes.scales.repeat_interleave(height, 0)[:outputs]
    return codes._replace(scales=scales, block=(1, size))
