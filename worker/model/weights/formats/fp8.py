"""Matrices of 8-bit floats, with a scale for the matrix or for each block of 128 times 128, as
DeepSeek and Qwen publish them."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

from torch import Tensor

from kernels.providers import Provider
from worker.model.weights.formats.coded import (
    Coded,
    check_finite,
    check_grid,
    declared,
    method_of,
    scaled,
)
from worker.model.weights.formats.device_weights import Codes, bytes_on_device
from worker.model.weights.sources import TensorSource

FLOAT8 = frozenset({"F8_E4M3", "F8_E5M2"})
_MODEL_OPT = {"FP8": None, "FP8_PB_WO": (128, 128), "FP8_BLOCK_SCALES": (128, 128)}
"""The blocks of ModelOpt's algorithms."""


class Fp8(Coded):
    """``weight`` times ``weight_scale_inv`` (blocks) or ``weight_scale`` (for the whole matrix)."""

    name: ClassVar[str] = "FP8"
    kinds: ClassVar[str] = "one scale for a matrix or for each block"
    packed_for: ClassVar[frozenset[Provider]] = frozenset({"triton"})
    bytes_per_weight: ClassVar[str] = "those of the data type, 1.00 on a GPU"
    suffixes: ClassVar[frozenset[str]] = frozenset(
        {"weight", "weight_scale_inv", "weight_scale", "input_scale", "activation_scale"}
    )
    stacked_parts: ClassVar[Mapping[str, str]] = {"": "weight", "_scale_inv": "weight_scale_inv"}

    def __init__(self, block: tuple[int, int] | None) -> None:
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
        return cls(None if block is None else (int(block[0]), int(block[1])))

    def is_coded(self, source: TensorSource, stem: str) -> bool:
        name = f"{stem}weight"
        return source.has(name) and source.kind(name) in FLOAT8

    def shape(self, source: TensorSource, stem: str) -> tuple[int, int]:
        outputs, inputs = source.shape(f"{stem}weight")
        return outputs, inputs

    def decoder(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int]
    ) -> Callable[[], Tensor]:
        scales = tensors.get("weight_scale_inv", tensors.get("weight_scale"))
        if scales is None:
            raise ValueError("it has no scale")
        check_finite(scales)
        if self._block is not None and scales.numel() > 1:
            expected = tuple(-(-n // size) for n, size in zip(shape, self._block, strict=True))
            if tuple(scales.shape) != expected:
                raise ValueError(f"scales have the shape {tuple(scales.shape)}, not {expected}")
            rows, columns = self._block

            def decode() -> Tensor:
                grid = scales.repeat_interleave(rows, 0)[: shape[0]]
                wide = grid.repeat_interleave(columns, 1)[:, : shape[1]]
                return tensors["weight"].float() * wide.float()

            return decode
        grid = scales.view(-1, 1) if scales.ndim == 1 else scales
        check_grid(shape, grid)
        return lambda: scaled(tensors["weight"], grid)

    def device_bytes(self, source: TensorSource, stem: str) -> float | None:
        (_, inputs) = shape = self.shape(source, stem)
        columns = 1 if self._block is None else -(-inputs // self._block[1])
        return bytes_on_device(shape, 8, columns)

    def device_codes(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Codes | None:
        scales = tensors.get("weight_scale_inv", tensors.get("weight_scale"))
        assert scales is not None, "checked by the decoder"
        grid = scales.view(-1, 1) if scales.ndim < 2 else scales
        even = (-(-shape[0] // grid.shape[0]), -(-shape[1] // grid.shape[1]))
        is_one = grid.numel() == 1 or self._block is None
        return Codes(tensors["weight"], grid, even if is_one else self._block or even)
