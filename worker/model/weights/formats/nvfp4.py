"""Checkpoints of NVFP4: floats of 4 bits, of which 16 inputs share an 8-bit float, and all of a
matrix a 32-bit float."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from kernels.planes import LAYOUTS, Planes, packed_planes
from kernels.providers import Provider
from worker.model.weights.formats.coded import (
    Coded,
    check_finite,
    declared,
    holds,
    layouts_of,
    method_of,
)
from worker.model.weights.formats.float4 import check_pairs, scaled_floats
from worker.model.weights.sources import TensorSource

_GROUP = 16


class Nvfp4(Coded):
    """The codes and scales of compressed-tensors are ``weight_packed``, ``weight_scale`` and the
    divisor ``weight_global_scale``; those of TensorRT Model Optimizer ``weight``, ``weight_scale``
    and the factor ``weight_scale_2``."""

    name: ClassVar[str] = "NVFP4"
    kinds: ClassVar[str] = "compressed-tensors and ModelOpt"
    packed_for: ClassVar[frozenset[Provider]] = frozenset({"triton"})
    bytes_per_weight: ClassVar[str] = "those of the data type, 0.56 on a GPU"
    suffixes: ClassVar[frozenset[str]] = frozenset(
        {
            *("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"),
            *("weight", "weight_scale_2", "input_scale"),
        }
    )

    @classmethod
    def detect(cls, config: Mapping[str, Any], source: TensorSource) -> Self | None:
        is_compressed = layouts_of(config) == {"nvfp4-pack-quantized"}
        algorithm = (declared(config) or {}).get("quant_algo")
        is_model_opt = method_of(config) == "modelopt" and algorithm in ("NVFP4", "W4A16_NVFP4")
        return cls() if is_compressed or is_model_opt else None

    def is_coded(self, source: TensorSource, stem: str) -> bool:
        plain = f"{stem}weight"
        is_short = source.has(plain) and source.kind(plain) == "U8"
        return is_short or source.has(f"{stem}weight_packed")

    def shape(self, source: TensorSource, stem: str) -> tuple[int, int]:
        packed = f"{stem}weight_packed"
        outputs, num_bytes = source.shape(packed if source.has(packed) else f"{stem}weight")
        return outputs, num_bytes * 2

    def decoder(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int]
    ) -> Callable[[], Tensor]:
        is_compressed, pairs, scales, whole = _stored(tensors)
        check_pairs(pairs, scales, _GROUP)
        if whole.numel() != 1:
            raise ValueError(f"its global scale has the shape {tuple(whole.shape)}")
        check_finite(scales)
        check_finite(whole)
        if not holds(whole, lambda value: value > 0):
            raise ValueError("its global scale is not positive")

        def decode() -> Tensor:
            factor = whole.float().flatten()
            wide = scales.float()
            return scaled_floats(pairs, wide / factor if is_compressed else wide * factor)

        return decode

    def device_bytes(self, source: TensorSource, stem: str) -> float | None:
        has_layout = source.kind(f"{stem}weight_scale") == "F8_E4M3"
        return LAYOUTS["nvfp4"].bytes_per_weight if has_layout else None

    def device_codes(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Planes:
        """The layout has doubled values."""
        is_compressed, pairs, scales, whole = _stored(tensors)
        codes = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)
        number = whole.float() * (2 if is_compressed else 0.5)
        headers = number.view(1, 1, 1).expand(len(pairs), 1, 1)
        layout = "nvfp4 quotients" if is_compressed else "nvfp4"
        return packed_planes(layout, codes, scales.unsqueeze(-1), headers)


def _stored(tensors: Mapping[str, Tensor]) -> tuple[bool, Tensor, Tensor, Tensor]:
    """Whether the checkpoint is of compressed-tensors, and bytes of two codes, the scales of groups
    and the number for the whole matrix."""
    is_compressed = "weight_packed" in tensors
    return (
        is_compressed,
        tensors["weight_packed" if is_compressed else "weight"],
        tensors["weight_scale"],
        tensors["weight_global_scale" if is_compressed else "weight_scale_2"],
    )
