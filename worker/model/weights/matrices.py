"""Reads the matrices of a checkpoint, as floats or packed."""

from typing import Protocol

import torch
from torch import Tensor

from kernels.quantized import (
    BLOCK_INPUTS,
    Matrix,
    QuantFormat,
    QuantizedWeight,
    dequantize,
    quantize,
)
from shared.errors import StartupError
from worker.checkpoints.checkpoint import Checkpoint
from worker.model.weights.awq import AwqMatrices, AwqWeight
from worker.model.weights.gguf import GgufWeights

_TABLE_FORMAT: QuantFormat = "q8_0"


class MatrixReader(Protocol):
    """The protocol of a reader. Both methods raise `StartupError` for a missing tensor or a wrong
    shape."""

    def table(self, name: str, shape: tuple[int, int]) -> Matrix:
        """The embedding or output projection, [vocab_size, hidden_size]."""
        ...

    def linear(self, names: list[str], shape: tuple[int, int]) -> Matrix | AwqWeight:
        """The named tensors stacked, [sum of outputs, inputs]."""
        ...


def matrix_reader(
    checkpoint: Checkpoint,
    head_dim: int,
    weight_format: torch.dtype | QuantFormat,
    device: torch.device,
    *,
    is_awq: bool = False,
    awq_stays: bool = False,
) -> MatrixReader:
    """Choose the reader: a dtype reads matrices as plain tensors, a quantized format packs them.

    Matrices of an AWQ checkpoint are converted to plain tensors unless ``awq_stays``. Raises
    `StartupError` if they would have to be quantized again.
    """
    if not isinstance(weight_format, torch.dtype):
        if is_awq:
            raise StartupError(f"weight_format {weight_format}: the checkpoint is packed as AWQ")
        return PackedMatrices(checkpoint, head_dim, weight_format, device)
    if is_awq:
        return AwqMatrices(checkpoint, weight_format, device, stay_packed=awq_stays)
    return FloatMatrices(checkpoint, weight_format, device)


class FloatMatrices:
    """Matrices as tensors of one dtype."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device

    def table(self, name: str, shape: tuple[int, int]) -> Tensor:
        return self.linear([name], shape)

    def linear(self, names: list[str], shape: tuple[int, int]) -> Tensor:
        return self._checkpoint.read(names, shape, self._dtype, self._device)


class PackedMatrices:
    """Matrices in one quantized format; embedding and output projection in q8_0.

    These two affect quality most, and a token reads only one row of the embedding. If a GGUF file
    beside the checkpoint is mostly in this format, for example the one that the checkpoint was
    converted from, its blocks are used unchanged, each matrix in its own format. Everything else is
    quantized from the checkpoint. Also raises `StartupError` for a matrix that cannot be packed.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        head_dim: int,
        quant_format: QuantFormat,
        device: torch.device,
    ) -> None:
        self._checkpoint = checkpoint
        self._format = quant_format
        self._device = device
        files = [GgufWeights(path, head_dim) for path in checkpoint.directory.glob("*.gguf")]
        self._files = [file for file in files if file.main_format == quant_format]

    def table(self, name: str, shape: tuple[int, int]) -> QuantizedWeight:
        return self._read([name], shape, _TABLE_FORMAT)

    def linear(self, names: list[str], shape: tuple[int, int]) -> QuantizedWeight:
        return self._read(names, shape, self._format)

    def _read(
        self, names: list[str], shape: tuple[int, int], quant_format: QuantFormat
    ) -> QuantizedWeight:
        if shape[1] % BLOCK_INPUTS:
            raise StartupError(
                f"{names[0]} has {shape[1]} inputs, {self._format} needs a multiple of "
                f"{BLOCK_INPUTS}: use another weight format"
            )
        stored = self._checkpoint.parts(names, shape)
        parts = [
            self._found(name, part) or _quantized(name, part, quant_format)
            for name, part in zip(names, stored, strict=True)
        ]
        return _stacked(parts, quant_format, self._device)

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
