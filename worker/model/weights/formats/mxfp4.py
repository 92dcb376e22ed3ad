"""Checkpoints of MXFP4: floats of 4 bits, of which 32 inputs share a power of two (Open Compute
Project, OCP Microscaling Formats, version 1.0)."""

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from kernels.block_planes import block_planes
from kernels.planes import Planes
from kernels.providers import Provider
from kernels.quantized import BLOCKS, MAX_EXPONENT, QuantizedWeight
from worker.model.weights.formats.coded import Coded, holds, layouts_of, method_of
from worker.model.weights.formats.device_weights import DEVICE_BLOCKS
from worker.model.weights.formats.float4 import check_pairs, scaled_floats
from worker.model.weights.sources import TensorSource

_BLOCKS = "mxfp4"
_GROUP, _BLOCK_BYTES = BLOCKS[_BLOCKS]
_MIDDLE = 127
"""The stored exponent of 1."""


class Mxfp4(Coded):
    """Codes and exponents are ``blocks`` [outputs, groups, 16] and ``scales`` in gpt-oss, where
    those of all experts are together in tensors whose names end with ``_blocks`` and ``_scales``.
    In compressed-tensors they are ``weight_packed`` and ``weight_scale``."""

    name: ClassVar[str] = "MXFP4"
    kinds: ClassVar[str] = "gpt-oss, and compressed-tensors' `mxfp4-pack-quantized`"
    packed_for: ClassVar[frozenset[Provider]] = frozenset({"native", "triton"})
    bytes_per_weight: ClassVar[str] = "those of the file"
    suffixes: ClassVar[frozenset[str]] = frozenset(
        {"blocks", "scales", "weight_packed", "weight_scale"}
    )
    stacked_parts: ClassVar[Mapping[str, str]] = {"_blocks": "blocks", "_scales": "scales"}

    @classmethod
    def detect(cls, config: Mapping[str, Any], source: TensorSource) -> Self | None:
        is_compressed = layouts_of(config) == {"mxfp4-pack-quantized"}
        return cls() if is_compressed or method_of(config) == "mxfp4" else None

    def is_coded(self, source: TensorSource, stem: str) -> bool:
        return any(source.has(f"{stem}{suffix}") for suffix in self.suffixes)

    def stem(self, name: str) -> str | None:
        """As in any format, and also of the matrices of all experts together."""
        stacked = (ending for ending in self.stacked_parts if name.endswith(ending))
        if (ending := next(stacked, None)) is not None:
            return name.removesuffix(ending) + "_"
        return super().stem(name)

    def shape(self, source: TensorSource, stem: str) -> tuple[int, int]:
        if source.has(f"{stem}weight_packed"):
            num_outputs, num_bytes = source.shape(f"{stem}weight_packed")
            return num_outputs, num_bytes * 2
        *outputs, num_groups, _ = source.shape(f"{stem}blocks")
        return math.prod(outputs), num_groups * _GROUP

    def decoder(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int]
    ) -> Callable[[], Tensor]:
        blocks = tensors.get("blocks")
        if blocks is not None and (blocks.ndim != 3 or blocks.shape[2] * 2 != _GROUP):
            raise ValueError(f"blocks have the shape {tuple(blocks.shape)}")
        pairs, exponents = _stored(tensors)
        check_pairs(pairs, exponents, _GROUP)
        if exponents.dtype != torch.uint8:
            raise ValueError(f"its exponents are {exponents.dtype}")
        if not holds(exponents, lambda values: values <= MAX_EXPONENT):
            raise ValueError("a scale is infinite or NaN, or makes weights infinite")

        def decode() -> Tensor:
            ones = torch.ones_like(exponents, dtype=torch.float32)
            return scaled_floats(pairs, torch.ldexp(ones, exponents.int() - _MIDDLE))

        return decode

    def block_format(self, source: TensorSource, stem: str) -> str | None:
        return _BLOCKS

    def device_bytes(self, source: TensorSource, stem: str) -> float | None:
        return DEVICE_BLOCKS[_BLOCKS]

    def device_codes(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Planes:
        return block_planes(self.blocks(tensors, shape, _BLOCKS))

    def blocks(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int], block_format: str
    ) -> QuantizedWeight:
        """ggml's blocks: an exponent, then the first half of the inputs in the low halves of bytes,
        and the second half in the high halves."""
        pairs, exponents = _stored(tensors)
        packed = pairs.new_empty(*exponents.shape, _BLOCK_BYTES)
        packed[..., 0] = exponents
        first, second = pairs.reshape(*exponents.shape, 2, _GROUP // 4).unbind(2)
        for place in range(2):
            packed[..., 1 + place :: 2] = (first >> 4 * place & 15) | (second >> 4 * place) << 4
        return QuantizedWeight(block_format, packed)


def _stored(tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Bytes of two codes, [outputs, inputs / 2], and exponents, [outputs, inputs / 32]."""
    if "blocks" in tensors:
        return tensors["blocks"].flatten(1), tensors["scales"]
    return tensors["weight_packed"], tensors["weight_scale"]
