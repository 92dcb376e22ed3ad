"""How the matrices of a checkpoint are read: as floats, or packed."""

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
    """Both methods raise `StartupError` where a tensor is missing or has another shape."""

    def table(self, name: str, shape: tuple[int, int]) -> Matrix:
        """Embedding or output projection, [vocab_size, hidden_size]."""
        ...

    def linear(self, names: list[str], shape: tuple[int, int]) -> Matrix | AwqWeight:
        """The named tensors one below the other, [outputs of all, inputs]."""
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
    """A dtype reads matrices as plain tensors, a quantized format packs them.

    Those of an AWQ checkpoint become plain tensors, too, unless ``awq_stays``. Raises
    `StartupError` where they would have to be packed again.
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

    These two cost quality first, and a token reads but one row of the embedding. A GGUF file beside
    the checkpoint that is mostly in this format, as one that the checkpoint was converted from is,
    gives its blocks as they are, each matrix in its own format. All else is quantized from the
    checkpoint. Also raises `StartupError` for what cannot be packed.
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
                f"{BLOCK_INPUTS}: choose a weight format of floats"
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
    """Whether a checkpoint holds these values, rounded to its type; judged by eight rows.

    A file may lie beside a checkpoint that it has nothing to do with, or order its rows otherwise.
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
    """``quant_format`` is that of parts which differ in theirs."""
    if len({part.format for part in parts}) > 1:
        parts = [
            part if part.format == quant_format else quantize(dequantize(part), quant_format)
            for part in parts
        ]
    blocks = torch.cat([part.blocks for part in parts]).to(device)
    return QuantizedWeight(parts[0].format, blocks)
