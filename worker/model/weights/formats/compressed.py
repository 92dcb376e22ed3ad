"""Checkpoints of compressed-tensors (llm-compressor): integers of 4 or 8 bits, or 8-bit floats,
with scales for each tensor, output, group of inputs or block."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

from torch import Tensor

from shared.errors import StartupError
from worker.model.weights.formats.coded import (
    Coded,
    check_finite,
    check_grid,
    declared,
    method_of,
    scaled,
)
from worker.model.weights.formats.fp8 import FLOAT8
from worker.model.weights.formats.gptq import unpack_words
from worker.model.weights.sources import TensorSource

_LAYOUTS = frozenset({"pack-quantized", "int-quantized", "float-quantized", "naive-quantized"})


class CompressedTensors(Coded):
    """``weight_packed`` (words of codes), or ``weight`` (integers or floats of 8 bits)."""

    name: ClassVar[str] = "compressed-tensors"
    kinds: ClassVar[str] = "W4A16, W8A16, W8A8 in int8 or float8, without act-order"
    suffixes: ClassVar[frozenset[str]] = frozenset(
        {
            *("weight_packed", "weight", "weight_scale", "weight_zero_point", "weight_shape"),
            *("weight_g_idx", "input_scale", "input_zero_point"),
        }
    )

    def __init__(self, bits: int) -> None:
        """``bits`` of the codes in a word."""
        self._bits = bits

    @classmethod
    def detect(cls, config: Mapping[str, Any], source: TensorSource) -> Self | None:
        if method_of(config) != "compressed-tensors":
            return None
        described = declared(config) or {}
        groups = list((described.get("config_groups") or {}).values())
        layouts = {group.get("format") or described.get("format") for group in groups}
        bits: set[Any] = {(group.get("weights") or {}).get("num_bits") for group in groups}
        if not layouts or not layouts <= _LAYOUTS or len(bits) != 1 or not bits <= {4, 8}:
            raise StartupError(
                "the model's weights are quantized with compressed-tensors ("
                f"{', '.join(sorted(map(str, layouts)))} of {', '.join(sorted(map(str, bits)))} "
                "bits), which is not supported"
            )
        return cls(bits.pop())

    def is_coded(self, source: TensorSource, stem: str) -> bool:
        plain = f"{stem}weight"
        is_short = source.has(plain) and source.kind(plain) in {*FLOAT8, "I8"}
        return is_short or source.has(f"{stem}weight_packed")

    def shape(self, source: TensorSource, stem: str) -> tuple[int, int]:
        if source.has(f"{stem}weight_packed"):
            outputs, words = source.shape(f"{stem}weight_packed")
            return outputs, words * 32 // self._bits
        outputs, inputs = source.shape(f"{stem}weight")
        return outputs, inputs

    def decoder(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int]
    ) -> Callable[[], Tensor]:
        if "weight_scale" not in tensors:
            raise ValueError("it has no scale")
        scales, zeros = tensors["weight_scale"], tensors.get("weight_zero_point")
        check_finite(scales)
        if scales.ndim == 1 and scales.numel() > 1:
            scales = scales.view(-1, 1)
        if (order := tensors.get("weight_g_idx")) is not None and (order.diff() < 0).any():
            raise ValueError("its inputs are in another order (act-order), which is not supported")
        if (stated := tensors.get("weight_shape")) is not None and tuple(stated.tolist()) != shape:
            raise ValueError(f"weight_shape says {tuple(stated.tolist())}, not {shape}")
        middle = 1 << self._bits - 1
        if zeros is not None and "weight_packed" in tensors and zeros.shape != scales.shape:
            # Packed along the outputs.
            zeros = unpack_words(zeros.t(), self._bits).t()[: len(scales)] - middle
        if zeros is not None and zeros.numel() != scales.numel():
            raise ValueError(f"zero points have the shape {tuple(zeros.shape)}")

        def decode() -> Tensor:
            packed = tensors.get("weight_packed")
            codes = tensors["weight"] if packed is None else unpack_words(packed, self._bits)
            numbers = codes.float() if packed is None else (codes - middle).float()
            if zeros is not None:
                ones = numbers.new_ones(()).expand(shape)
                numbers = numbers - scaled(ones, zeros.view(scales.shape))
            return scaled(numbers, scales)

        check_grid(shape, scales)
        return decode
