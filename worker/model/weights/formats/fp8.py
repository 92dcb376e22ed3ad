"""Matrices of 8-bit floats, with a scale for the matrix or for each block of 128 times 128, as
DeepSeek and Qwen publish them."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

from torch import Tensor

from kernels.providers import Provider
from kernels.quantized import QuantizedWeight
from worker.model.weights.formats.coded import (
    Block,
    Coded,
    check_finite,
    check_grid,
    declared,
    float8_blocks,
    float8_format,
    method_of,
    scaled,
)
from worker.model.weights.formats.device_weights import Codes, bytes_on_device
from worker.model.weights.sources import TensorSource

FLOAT8 = frozenset({"F8_E4M3", "F8_E5M2"})
_MODEL_OPT = {"FP8": None, "FP8_PB_WO": Block(128, 128), "FP8_BLOCK_SCALES": Block(128, 128)}
"""The blocks of ModelOpt's algorithms."""


class Fp8(Coded):
    """``weight`` times ``weight_scale_inv`` (blocks) or ``weight_scale`` (for the whole matrix)."""

    name: ClassVar[str] = "FP8"
    kinds: ClassVar[str] = "one scale for a matrix or for each block"
    packed_for: ClassVar[frozenset[Provider]] = frozenset({"native", "triton"})
    bytes_per_weight: ClassVar[str] = "1.03 on the CPU, 1.00 on a GPU"
    numerics: ClassVar[str] = "fused float8"
    suffixes: ClassVar[frozenset[str]] = frozenset(
        {"weight", "weight_scale_inv", "weight_scale", "input_scale", "activation_scale"}
    )
    stacked_parts: ClassVar[Mapping[str, str]] = {"": "weight", "_scale_inv": "weight_scale_inv"}

    def __init__(self, block: Block | None) -> None:
        """Without a ``block``, scales are those of outputs or of whole matrices."""
        self._block = block

    @classmethod
    def detect(cls, config: Mapping[str, Any], source: TensorSource) -> Self | None:
        described = declared(config) or {}
        algorithm = described.get("quant_algo")
        if method_of(config) == "modelopt" and algorithm in _MODEL_OPT:
            return cls(_MODEL_OPT[algorithm])
        if method_of(config) not in ("fp8", "fbgemm_fp8"):
            return None
        block = described.get("weight_block_size")
        return cls(None if block is None else Block(int(block[0]), int(block[1])))

    def is_coded(self, source: TensorSource, stem: str) -> bool:
        name = f"{stem}weight"
        return source.has(name) and source.kind(name) in FLOAT8

    def shape(self, source: TensorSource, stem: str) -> tuple[int, int]:
        outputs, inputs = source.shape(f"{stem}weight")
        return outputs, inputs

    def decoder(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int]
    ) -> Callable[[], Tensor]:
        scales = _scales(tensors)
        check_finite(scales)
        grid, block = self._grid(scales, shape)
        check_grid(shape, grid, block)
        return lambda: scaled(tensors["weight"], grid, block)

    def block_format(self, source: TensorSource, stem: str) -> str | None:
        shape = self.shape(source, stem)
        _, width = (self._block or Block()).of(shape)
        return float8_format(source.kind(f"{stem}weight"), shape[1], width)

    def blocks(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int], block_format: str
    ) -> QuantizedWeight | None:
        return float8_blocks(tensors["weight"], *self._grid(_scales(tensors), shape))

    def device_bytes(self, source: TensorSource, stem: str) -> float | None:
        shape = self.shape(source, stem)
        return bytes_on_device(shape[1], 8, (self._block or Block()).of(shape))

    def device_codes(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Codes | None:
        return Codes(tensors["weight"], *self._grid(_scales(tensors), shape))

    def _grid(self, scales: Tensor, shape: tuple[int, int]) -> tuple[Tensor, tuple[int, int]]:
        """The scales as [rows, columns], and the outputs and inputs of their blocks."""
        grid = scales.view(-1, 1) if scales.ndim < 2 else scales
        block = Block() if grid.numel() == 1 else self._block or Block(outputs=1)
        return grid, block.of(shape)


def _scales(tensors: Mapping[str, Tensor]) -> Tensor:
    scales = tensors.get("weight_scale_inv", tensors.get("weight_scale"))
    if scales is None:
        raise ValueError("it has no scale")
    return scales
