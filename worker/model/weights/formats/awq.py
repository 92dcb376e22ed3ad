"""Checkpoints in AutoAWQ's layout: 4-bit matrices with a scale and a zero point for each group of
inputs (Lin et al., arXiv:2306.00978)."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from kernels.awq_layout import NIBBLES, check_stored, repack_awq, unpack_awq
from kernels.providers import Provider
from kernels.quantized import BLOCKS
from shared.errors import StartupError
from worker.model.weights.formats.blocks import BlockWeight
from worker.model.weights.formats.coded import (
    INTEGER_BLOCKS,
    are_whole_blocks,
    check_finite,
    check_group_size,
    declared,
    integer_blocks,
    method_of,
)
from worker.model.weights.formats.dense import Dense
from worker.model.weights.formats.device_weights import AwqWeight
from worker.model.weights.formats.interface import Format, Target
from worker.model.weights.sources import TensorSource
from worker.model.weights.weight import Weight

LAYOUT: Mapping[str, Any] = {"bits": 4, "version": "gemm", "zero_point": True}
"""The only layout that is supported."""
_BLOCKS = INTEGER_BLOCKS[4, True]


class Awq(Format):
    """Matrices that are packed, and matrices that the checkpoint stores as floats."""

    name: ClassVar[str] = "AWQ"
    kinds: ClassVar[str] = "4 bits, layout `gemm`"
    packed_for: ClassVar[frozenset[Provider]] = frozenset({"native", "triton"})
    bytes_per_weight: ClassVar[str] = "0.69 on the CPU, those of the file on a GPU"
    numerics: ClassVar[str] = "fused integers"

    def __init__(self, group_size: int | None = None) -> None:
        """``group_size`` is what config.json says, if anything."""
        self._group_size = group_size

    @classmethod
    def detect(cls, config: Mapping[str, Any], source: TensorSource) -> Self | None:
        if method_of(config) != "awq":
            return None
        described = declared(config) or {}
        odd = [f"{k} {described[k]}" for k in LAYOUT if described.get(k, LAYOUT[k]) != LAYOUT[k]]
        if odd:
            raise StartupError(
                f"the model's weights are quantized with awq ({', '.join(odd)}), which is not "
                "supported: use the model in its original precision, or as a GGUF file"
            )
        return cls(described.get("group_size"))

    def read(
        self, source: TensorSource, names: list[str], shape: tuple[int, int], target: Target
    ) -> Weight:
        are_packed = {source.has(_part(name, "qweight")) for name in names}
        if len(are_packed) > 1:
            raise StartupError(
                f"{names[0]} is packed as AWQ, but the matrices fused with it are not"
            )
        if are_packed == {False}:
            return Dense().read(source, names, shape, target)
        return self._packed(source, names, shape, target)

    def num_bytes(self, source: TensorSource, target: Target) -> int:
        """Words of packed bits stay as they are, or become blocks or floats."""
        stays = target.provider in AwqWeight.providers

        def bytes_per_element(name: str) -> float:
            if source.kind(name) != "I32":
                return target.dtype.itemsize
            if stays:
                return torch.int32.itemsize
            if not name.endswith(".qweight"):
                return 0
            inputs = source.shape(name)[0]
            num_groups = source.shape(name.removesuffix("qweight") + "scales")[0]
            if target.provider == "native" and are_whole_blocks(inputs, num_groups):
                return NIBBLES * BLOCKS[_BLOCKS].bytes_per_weight
            return NIBBLES * target.dtype.itemsize

        return math.ceil(
            sum(math.prod(source.shape(name)) * bytes_per_element(name) for name in source.names)
        )

    def _packed(
        self, source: TensorSource, names: list[str], shape: tuple[int, int], target: Target
    ) -> Weight:
        """The named matrices, concatenated; AWQ stores them transposed."""
        qweight, qzeros, scales = (
            _joined(source, [_part(name, kind) for name in names]).to(target.device)
            for kind in ("qweight", "qzeros", "scales")
        )
        outputs, inputs = shape
        if qweight.shape != (inputs, outputs // NIBBLES):
            raise StartupError(
                f"{_part(names[0], 'qweight')} has shape {tuple(qweight.shape)}, config.json says "
                f"{(inputs, outputs // NIBBLES)}"
            )
        try:
            check_stored(qweight, qzeros, scales)
            check_group_size(inputs, len(scales), self._group_size, are_equal=True)
            check_finite(scales)
            if target.provider == "native" and are_whole_blocks(inputs, len(scales)):
                codes, zeros = unpack_awq(qweight).to(torch.int8), unpack_awq(qzeros).to(torch.int8)
                numbers = codes - zeros.repeat_interleave(inputs // len(scales), 0)
                if (kept := integer_blocks(numbers.t(), scales.t(), _BLOCKS)) is not None:
                    return BlockWeight(kept)
            return AwqWeight(*repack_awq(qweight, qzeros, scales))
        except ValueError as error:
            raise StartupError(f"{names[0]} cannot be unpacked: {error}") from None


def _joined(source: TensorSource, names: list[str]) -> Tensor:
    """The named tensors, [rows, *], side by side."""
    parts = [source.get(name) for name in names]
    if any(part.ndim != 2 or len(part) != len(parts[0]) for part in parts):
        shapes = ", ".join(str(tuple(part.shape)) for part in parts)
        raise StartupError(f"{names[0]} and those fused with it have shapes {shapes}")
    return torch.cat(parts, dim=1)


def _part(name: str, kind: str) -> str:
    return f"{name.removesuffix('weight')}{kind}"
