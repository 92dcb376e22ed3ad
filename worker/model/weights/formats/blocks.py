"""Matrices in ggml's blocks: the matrices of a GGUF file, and floats that are quantized as they are
read."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from kernels.native.packed import FORMATS, PACKED_BLOCKS, Rows, can_be_stacked
from kernels.providers import Ops, Provider
from kernels.quantized import (
    BLOCKS,
    QuantFormat,
    QuantizedWeight,
    dequantize,
    has_finite_scales,
    quantize,
)
from shared.errors import StartupError
from worker.model.weights.formats.device_weights import (
    DEVICE_BLOCKS,
    of_blocks,
    on_device,
)
from worker.model.weights.formats.interface import Format, Target
from worker.model.weights.sources import TensorSource
from worker.model.weights.weight import DenseWeight, StackedWeight, Weight

_TABLE_FORMAT: QuantFormat = "q8_0"
_TABLES = ("token_embd.weight", "output.weight")
"""The embedding and the output projection of a GGUF file, which are floats on a GPU."""


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """A `Weight` in blocks of a single format."""

    packed: QuantizedWeight
    order: Tensor | None = None
    """[inputs] int32: the inputs of the columns in blocks; None: in their order."""
    unchecked: str | None = None
    """The name of a matrix whose scales are checked where it is used: by the library, which packs
    it, or before it is expanded. None: they are finite."""

    @property
    def providers(self) -> frozenset[Provider]:
        return frozenset({"native"}) if self.packed.format in FORMATS else frozenset()

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape

    @property
    def num_bytes(self) -> int:
        return self.packed.blocks.nbytes

    def linear(self, hidden: Tensor, bias: Tensor | None, ops: Ops) -> Tensor:
        return ops.projection(hidden, self.dense(hidden.dtype), bias)

    def rows(self, ids: Tensor) -> Tensor:
        return self._in_order(dequantize(self.packed.rows(ids)))

    def selected(self, ids: Tensor) -> "BlockWeight":
        return BlockWeight(self.packed.rows(ids), self.order, self.unchecked)

    def dense(self, dtype: torch.dtype) -> Tensor:
        if self.unchecked is not None:
            _check_scales(self.unchecked, self.packed)
        return self._in_order(dequantize(self.packed).to(dtype))

    def native_rows(self) -> Sequence[Rows]:
        return [Rows.of_blocks(self.packed, self.order, self.unchecked)]

    def _in_order(self, columns: Tensor) -> Tensor:
        """The columns in the order of the inputs."""
        return columns if self.order is None else columns[:, self.order.argsort()]


class Gguf(Format):
    """The matrices of a GGUF file, each in its own format, as they are in the file."""

    name: ClassVar[str] = "GGUF"
    kinds: ClassVar[str] = "see below"
    packed_for: ClassVar[frozenset[Provider]] = frozenset({"native", "triton"})
    bytes_per_weight: ClassVar[str] = "those of the file"

    @classmethod
    def detect(cls, config: Mapping[str, Any], source: TensorSource) -> Self | None:
        return cls() if source.container == "GGUF" else None

    def dtype(self, source: TensorSource, device: torch.device) -> torch.dtype:
        """On the CPU, activations are float32 in any case, and no kernel has a cache of
        float16."""
        is_half = device.type == "cpu" and source.dtype == torch.float16
        return torch.bfloat16 if is_half else source.dtype

    def read(
        self, source: TensorSource, names: list[str], shape: tuple[int, int], target: Target
    ) -> Weight:
        source.check_shape(names, shape)
        if target.provider == "triton" and (kept := _on_device(source, names, target)) is not None:
            return kept
        parts = [_stored(source, name, target) for name in names]
        if len(parts) == 1:
            return parts[0]
        is_native = target.provider == "native"
        if is_native and can_be_stacked([row for part in parts for row in part.native_rows()]):
            return StackedWeight(tuple(parts))
        return DenseWeight(torch.cat([part.dense(target.dtype) for part in parts]))

    def num_bytes(self, source: TensorSource, target: Target) -> int:
        def bytes_per_weight(name: str) -> float:
            kind = source.kind(name)
            if target.provider == "native" and kind in PACKED_BLOCKS:
                return BLOCKS[kind].bytes_per_weight
            if target.provider == "triton" and kind in DEVICE_BLOCKS and name not in _TABLES:
                return DEVICE_BLOCKS[kind]
            return torch.float16.itemsize if _stays(kind, target) else target.dtype.itemsize

        return math.ceil(
            sum(math.prod(source.shape(name)) * bytes_per_weight(name) for name in source.names)
        )


class Quantized(Format):
    """Floats that are quantized as they are read; embedding and output projection to q8_0.

    These two affect quality most, and a token reads only one row of the embedding. Matrices that
    are stored in blocks stay as they are.
    """

    name: ClassVar[str] = "quantized"
    kinds: ClassVar[str] = "q8_0, q4_0 and q4_1"
    packed_for: ClassVar[frozenset[Provider]] = frozenset({"native", "triton"})

    def __init__(self, quant_format: QuantFormat) -> None:
        self._format = quant_format

    @classmethod
    def detect(cls, config: Mapping[str, Any], source: TensorSource) -> Self | None:
        return None  # a user asks for it

    def dtype(self, source: TensorSource, device: torch.device) -> torch.dtype:
        return torch.bfloat16

    def read(
        self, source: TensorSource, names: list[str], shape: tuple[int, int], target: Target
    ) -> Weight:
        return self._read(source, names, shape, target, self._format)

    def read_table(
        self, source: TensorSource, name: str, shape: tuple[int, int], target: Target
    ) -> Weight:
        return self._read(source, [name], shape, target, _TABLE_FORMAT)

    def num_bytes(self, source: TensorSource, target: Target) -> int:
        size = {
            "native": BLOCKS[self._format].bytes_per_weight,
            "triton": DEVICE_BLOCKS.get(self._format, target.dtype.itemsize),
        }.get(target.provider, target.dtype.itemsize)
        return math.ceil(sum(math.prod(source.shape(name)) for name in source.names) * size)

    def _read(
        self,
        source: TensorSource,
        names: list[str],
        shape: tuple[int, int],
        target: Target,
        quant_format: QuantFormat,
    ) -> Weight:
        if all(source.kind(name) in BLOCKS for name in names):
            return Gguf().read(source, names, shape, target)
        size = BLOCKS[quant_format]
        if shape[1] % size.inputs:
            raise StartupError(
                f"{names[0]} has {shape[1]} inputs, {self._format} needs a multiple of "
                f"{size.inputs}: use another weight format"
            )
        source.check_shape(names, shape)
        parts = [_quantized(source, name, quant_format).blocks for name in names]
        packed = QuantizedWeight(quant_format, torch.cat(parts).to(target.device))
        matrix = of_blocks(packed) if target.provider == "triton" else None
        return (None if matrix is None else on_device([matrix])) or BlockWeight(packed)


def _on_device(source: TensorSource, names: list[str], target: Target) -> Weight | None:
    """Matrices in blocks that a GPU multiplies; None if there are others."""
    if any(source.kind(name) not in DEVICE_BLOCKS for name in names):
        return None
    parts = [of_blocks(_blocks(source, name, target.device)) for name in names]
    return on_device([part for part in parts if part is not None])


def _stored(source: TensorSource, name: str, target: Target) -> Weight:
    kind = source.kind(name)
    if kind in PACKED_BLOCKS and target.provider == "native":
        return BlockWeight(
            QuantizedWeight(kind, source.get(name).to(target.device)), unchecked=name
        )
    if kind in BLOCKS:
        return BlockWeight(_blocks(source, name, target.device))
    held = source.get(name).to(target.device)
    return DenseWeight(held if _stays(kind, target) else held.to(target.dtype))


def _blocks(source: TensorSource, name: str, device: torch.device | None = None) -> QuantizedWeight:
    """A matrix that is stored in blocks, moved to a device if one is given. Raises `StartupError`
    if a scale is not finite."""
    packed = QuantizedWeight(source.kind(name), source.get(name).to(device=device))
    _check_scales(name, packed)
    return packed


def _check_scales(name: str, matrix: QuantizedWeight) -> None:
    """Raise `StartupError` if a scale is not finite."""
    if not has_finite_scales(matrix):
        raise StartupError(f"{name} cannot be read as {matrix.format}: a scale is infinite or NaN")


def _stays(kind: str, target: Target) -> bool:
    """Whether floats keep their type: the native kernel for float16 computes in float32."""
    return kind == "F16" and target.provider == "native"


def _quantized(source: TensorSource, name: str, quant_format: QuantFormat) -> QuantizedWeight:
    is_packed = source.kind(name) in BLOCKS
    floats = dequantize(_blocks(source, name)) if is_packed else source.get(name)
    try:
        return quantize(floats, quant_format)
    except ValueError as error:
        raise StartupError(f"{name} cannot be packed as {quant_format}: {error}") from None
