"""Matrices of random numbers, created on the device."""

import torch
from torch import Tensor

from kernels.awq_layout import CHUNK_INPUTS, CHUNK_WORDS
from kernels.planes import LAYOUTS, Planes, packed_planes
from worker.model.weights.formats.device_weights import AwqWeight
from worker.model.weights.weight import DenseWeight

AWQ_GROUP = 128
_STD = 0.02


class RandomWeights:
    """Random matrices of a device and dtype."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype

    def dense(self, outputs: int, inputs: int) -> DenseWeight:
        """[outputs, inputs]."""
        matrix = torch.empty(outputs, inputs, dtype=self._dtype, device=self._device)
        return DenseWeight(matrix.normal_(std=_STD))

    def awq(self, outputs: int, inputs: int) -> AwqWeight:
        """[outputs, inputs] in 4 bits."""
        groups = (inputs // AWQ_GROUP, outputs)
        words = (inputs // CHUNK_INPUTS, outputs, CHUNK_WORDS)
        least = -(1 << 31)
        return AwqWeight(
            torch.randint(least, 1 << 31, words, dtype=torch.int32, device=self._device),
            torch.rand(groups, device=self._device).mul_(_STD / 4).half(),
            torch.randint(6, 10, groups, device=self._device).to(torch.uint8),
        )

    def planes(self, plane_format: str, outputs: int, inputs: int) -> Planes:
        """[outputs, inputs], a multiple of 256, in a format of `LAYOUTS`."""
        layout = LAYOUTS[plane_format]
        groups = inputs // layout.group
        shape = (outputs, groups // (layout.header_groups or groups), layout.header_size)
        headers = torch.rand(shape, device=self._device) * _STD / 64
        return packed_planes(
            plane_format,
            self._bytes(0, 1 << layout.low_bits + layout.high_bits, outputs, inputs),
            # Bytes of this range are moderate numbers as exponents and as 8-bit floats, too.
            self._bytes(96, 120, outputs, groups, layout.scale_bytes),
            headers.half() if layout.header_groups else headers,
        )

    def _bytes(self, least: int, end: int, *shape: int) -> Tensor:
        return torch.randint(least, end, shape, dtype=torch.uint8, device=self._device)

    def norm(self, size: int) -> Tensor:
        return torch.rand(size, device=self._device).add_(0.5).to(self._dtype)
