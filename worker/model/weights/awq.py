"""Checkpoints in AutoAWQ's layout: 4-bit matrices with a scale and a zero point for each group of
inputs (Lin et al., arXiv:2306.00978)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.awq_layout import CHUNK_INPUTS, NIBBLES, dequantize_awq, repack_awq
from shared.errors import StartupError
from worker.checkpoints.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class AwqWeight:
    """A matrix [outputs, inputs] in the layout of `kernels.reference.awq_linear`."""

    qweight: Tensor
    scales: Tensor
    zeros: Tensor

    @property
    def group_size(self) -> int:
        """The number of inputs that share a scale and a zero point."""
        return self.qweight.shape[0] * CHUNK_INPUTS // self.scales.shape[0]


class AwqMatrices:
    """A `MatrixReader` of packed matrices, and of matrices that the checkpoint stores as floats.

    Unless packed matrices are kept, all become plain tensors of ``dtype``.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        *,
        stay_packed: bool,
    ) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._stay_packed = stay_packed

    def table(self, name: str, shape: tuple[int, int]) -> Tensor:
        return self._checkpoint.read([name], shape, self._dtype, self._device)

    def linear(self, names: list[str], shape: tuple[int, int]) -> Tensor | AwqWeight:
        are_packed = {self._checkpoint.has(_part(name, "qweight")) for name in names}
        if len(are_packed) > 1:
            raise StartupError(
                f"{names[0]} is packed as AWQ, but the matrices fused with it are not"
            )
        if are_packed == {False}:
            return self._checkpoint.read(names, shape, self._dtype, self._device)
        packed = self._packed(names, shape)
        if self._stay_packed:
            return packed
        dense = dequantize_awq(packed.qweight, packed.scales, packed.zeros)
        return dense.t().to(self._dtype, memory_format=torch.contiguous_format)

    def _packed(self, names: list[str], shape: tuple[int, int]) -> AwqWeight:
        """The named matrices, concatenated; AWQ stores them transposed."""
        qweight, qzeros, scales = (
            self._joined([_part(name, kind) for name in names])
            for kind in ("qweight", "qzeros", "scales")
        )
        outputs, inputs = shape
        if qweight.shape != (inputs, outputs // NIBBLES):
            raise StartupError(
                f"{_part(names[0], 'qweight')} has shape {tuple(qweight.shape)}, config.json says "
                f"{(inputs, outputs // NIBBLES)}"
            )
        try:
            return AwqWeight(*repack_awq(*(t.to(self._device) for t in (qweight, qzeros, scales))))
        except ValueError as error:
            raise StartupError(f"{names[0]} cannot be unpacked: {error}") from None

    def _joined(self, names: list[str]) -> Tensor:
        """The named tensors, [rows, *], side by side."""
        parts = [self._checkpoint.get(name) for name in names]
        if any(part.ndim != 2 or len(part) != len(parts[0]) for part in parts):
            shapes = ", ".join(str(tuple(part.shape)) for part in parts)
            raise StartupError(f"{names[0]} and those fused with it have shapes {shapes}")
        return torch.cat(parts, dim=1)


def _part(name: str, kind: str) -> str:
    return f"{name.removesuffix('weight')}{kind}"
