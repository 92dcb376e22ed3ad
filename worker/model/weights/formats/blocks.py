"""Matrices in ggml's blocks, whose inputs share scales."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from kernels.native.packed import Rows
from kernels.providers import Ops, Provider
from kernels.quantized import (
    BLOCK_BYTES,
    BLOCK_INPUTS,
    QuantFormat,
    QuantizedWeight,
    dequantize,
    quantize,
)
from shared.errors import StartupError
from worker.model.weights.formats.dense import num_elements
from worker.model.weights.formats.interface import Format, Target
from worker.model.weights.gguf import GgufWeights
from worker.model.weights.sources import TensorSource

_TABLE_FORMAT: QuantFormat = "q8_0"


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """A `Weight` in blocks of one format."""

    providers: ClassVar[frozenset[Provider]] = frozenset({"native"})
    packed: QuantizedWeight

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape

    @property
    def num_bytes(self) -> int:
        return self.packed.blocks.nbytes

    def linear(self, hidden: Tensor, bias: Tensor | None, ops: Ops) -> Tensor:
        return ops.projection(hidden, self.dense(hidden.dtype), bias)

    def rows(self, ids: Tensor) -> Tensor:
        return dequantize(self.packed.rows(ids))

    def dense(self, dtype: torch.dtype) -> Tensor:
        return dequantize(self.packed).to(dtype)

    def native_rows(self) -> Sequence[Rows]:
        return [Rows.of_blocks(self.packed)]


class Quantized(Format):
    """Floats that are quantized as they are read; embedding and output projection to q8_0.

    These two affect quality most, and a token reads only one row of the embedding. If a GGUF file
    beside the checkpoint is mostly in this format, for example the one that the checkpoint was
    converted from, its blocks are used unchanged, each matrix in its own format.
    """

    name: ClassVar[str] = "quantized"

    def __init__(self, quant_format: QuantFormat, directory: Path, head_dim: int) -> None:
        self._format = quant_format
        files = [GgufWeights(path, head_dim) for path in directory.glob("*.gguf")]
        self._files = [file for file in files if file.main_format == quant_format]

    @classmethod
    def detect(cls, config: Mapping[str, Any], source: TensorSource) -> Self | None:
        return None  # a user asks for it

    def read(
        self, source: TensorSource, names: list[str], shape: tuple[int, int], target: Target
    ) -> BlockWeight:
        return self._read(source, names, shape, target.device, self._format)

    def read_table(
        self, source: TensorSource, name: str, shape: tuple[int, int], target: Target
    ) -> BlockWeight:
        return self._read(source, [name], shape, target.device, _TABLE_FORMAT)

    def num_bytes(self, source: TensorSource, target: Target) -> int:
        if target.provider not in BlockWeight.providers:
            return num_elements(source) * target.dtype.itemsize
        return math.ceil(num_elements(source) * BLOCK_BYTES[self._format] / BLOCK_INPUTS)

    def _read(
        self,
        source: TensorSource,
        names: list[str],
        shape: tuple[int, int],
        device: torch.device,
        quant_format: QuantFormat,
    ) -> BlockWeight:
        if shape[1] % BLOCK_INPUTS:
            raise StartupError(
                f"{names[0]} has {shape[1]} inputs, {self._format} needs a multiple of "
                f"{BLOCK_INPUTS}: use another weight format"
            )
        stored = source.parts(names, shape)
        parts = [
            self._found(name, part) or _quantized(name, part, quant_format)
            for name, part in zip(names, stored, strict=True)
        ]
        return BlockWeight(_stacked(parts, quant_format, device))

    def _found(self, name: str, stored: Tensor) -> QuantizedWeight | None:
        for file in self._files:
            packed = file.get(name, tuple(stored.shape))
            if packed is not None and _is_same(packed, stored):
                return packed
        return None


def _is_same(packed: QuantizedWeight, stored: Tensor) -> bool:
    """Whether a checkpoint holds these values, rounded to its type; checked on eight rows.

    The file may be unrelated to the checkpoint, or order its rows differently.
    """
    rows = torch.linspace(0, len(stored) - 1, 8).long()
    return torch.equal(dequantize(packed.rows(rows)).to(stored.dtype), stored[rows])


def _quantized(name: str, stored: Tensor, quant_format: QuantFormat) -> QuantizedWeight:
    try:
        return quantize(stored, quant_format)
    except ValueError as error:
        raise StartupError(f"{name} cannot be packed as {quant_format}: {error}") from None


def _stacked(
    parts: list[QuantizedWeight], quant_format: QuantFormat, device: torch.device
) -> QuantizedWeight:
    """Stack the parts; ``quant_format`` is used if their formats differ."""
    if len({part.format for part in parts}) > 1:
        parts = [
            part if part.format == quant_format else quantize(dequantize(part), quant_format)
            for part in parts
        ]
    blocks = torch.cat([part.blocks for part in parts]).to(device)
    return QuantizedWeight(parts[0].format, blocks)
