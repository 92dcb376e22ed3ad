"""Checkpoints of compressed-tensors (llm-compressor): integers of 4 or 8 bits, or 8-bit floats,
with scales for each tensor, output, group of inputs or block."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from kernels.providers import Provider
from kernels.quantized import QuantizedWeight
from shared.errors import StartupError
from worker.model.weights.formats.coded import (
    INTEGER_BLOCKS,
    Block,
    Coded,
    are_whole_blocks,
    check_finite,
    check_grid,
    check_group_size,
    declared,
    float8_blocks,
    float8_format,
    holds,
    integer_blocks,
    layouts_of,
    method_of,
    scaled,
)
from worker.model.weights.formats.device_weights import Codes, bytes_on_device
from worker.model.weights.formats.fp8 import FLOAT8
from worker.model.weights.formats.gptq import unpack_words
from worker.model.weights.sources import TensorSource

_MIDDLE = 8
"""What is stored for the number 0 in 4 bits."""
_LAYOUTS = frozenset({"pack-quantized", "int-quantized", "float-quantized", "naive-quantized"})


class CompressedTensors(Coded):
    """``weight_packed`` (words of codes), or ``weight`` (integers or floats of 8 bits)."""

    name: ClassVar[str] = "compressed-tensors"
    kinds: ClassVar[str] = "W4A16, W8A16, W8A8 in int8 or float8, without act-order"
    packed_for: ClassVar[frozenset[Provider]] = frozenset({"native", "triton"})
    bytes_per_weight: ClassVar[str] = (
        "0.56 (4 bits), 0.69 (4, with zero points), 1.06 (int8), 1.03 (float8)"
    )
    numerics: ClassVar[str] = "fused integers float8"
    suffixes: ClassVar[frozenset[str]] = frozenset(
        {
            *("weight_packed", "weight", "weight_scale", "weight_zero_point", "weight_shape"),
            *("weight_g_idx", "input_scale", "input_zero_point"),
        }
    )
    descriptions: ClassVar[frozenset[str]] = frozenset({"weight_shape"})

    def __init__(self, bits: int, block: Block) -> None:
        """``bits`` of the codes in a word, and what shares a scale."""
        self._bits = bits
        self._block = block

    @classmethod
    def detect(cls, config: Mapping[str, Any], source: TensorSource) -> Self | None:
        if method_of(config) != "compressed-tensors":
            return None
        described = declared(config) or {}
        groups = list((described.get("config_groups") or {}).values())
        layouts = layouts_of(config)
        weights: list[Mapping[str, Any]] = [group.get("weights") or {} for group in groups]
        bits: set[Any] = {one.get("num_bits") for one in weights}
        if not layouts or not layouts <= _LAYOUTS or len(bits) != 1 or not bits <= {4, 8}:
            raise StartupError(
                "the model's weights are quantized with compressed-tensors ("
                f"{', '.join(sorted(layouts))} of {', '.join(sorted(map(str, bits)))} "
                "bits), which is not supported"
            )
        (block,) = {scale_block(one) for one in weights}  # `Mixed` reads groups that differ
        return cls(bits.pop(), block)

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
        scales = tensors["weight_scale"]
        check_finite(scales)
        scales = scales.view(-1, 1) if scales.ndim < 2 else scales
        block = self._block.of(shape)
        order = tensors.get("weight_g_idx")
        if order is not None and not holds(order, lambda groups: groups.diff() >= 0):
            raise ValueError("its inputs are in another order (act-order), which is not supported")
        if (stated := tensors.get("weight_shape")) is not None and tuple(stated.tolist()) != shape:
            raise ValueError(f"weight_shape says {tuple(stated.tolist())}, not {shape}")
        zeros = self._zeros(tensors, scales)
        if zeros is not None and zeros.numel() != scales.numel():
            raise ValueError(f"zero points have the shape {tuple(zeros.shape)}")

        def decode() -> Tensor:
            numbers = self._codes(tensors).float()
            if zeros is not None:
                ones = numbers.new_ones(()).expand(shape)
                numbers = numbers - scaled(ones, zeros, block)
            return scaled(numbers, scales, block)

        check_group_size(shape[1], scales.shape[1], self._block.inputs)
        check_grid(shape, scales, block)
        return decode

    def block_format(self, source: TensorSource, stem: str) -> str | None:
        is_packed = source.has(f"{stem}weight_packed")
        _, inputs = shape = self.shape(source, stem)
        height, size = self._block.of(shape)
        if not is_packed and (kept := float8_format(source.kind(f"{stem}weight"), inputs, size)):
            return kept
        has_integers = is_packed or source.kind(f"{stem}weight") == "I8"
        # Scales of 32 bits are hardly ever numbers of float16.
        is_short = has_integers and height == 1 and source.kind(f"{stem}weight_scale") != "F32"
        if not is_short or inputs % size or not are_whole_blocks(inputs, inputs // size):
            return None
        has_zeros = source.has(f"{stem}weight_zero_point")
        return INTEGER_BLOCKS.get((self._bits if is_packed else 8, has_zeros))

    def device_bytes(self, source: TensorSource, stem: str) -> float | None:
        bits = self._bits if source.has(f"{stem}weight_packed") else 8
        shape = self.shape(source, stem)
        return bytes_on_device(shape[1], bits, self._block.of(shape))

    def device_codes(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Codes | None:
        scales = tensors["weight_scale"]
        scales = scales.view(-1, 1) if scales.ndim < 2 else scales
        block = self._block.of(shape)
        numbers, zeros = self._codes(tensors), self._zeros(tensors, scales)
        if self._bits == 4 and "weight_packed" in tensors:
            codes = (numbers + _MIDDLE).to(torch.uint8)
            own = None if zeros is None else (zeros + _MIDDLE).to(torch.uint8)
            return Codes(codes, scales, block, own)
        if zeros is not None and bool(zeros.any()):
            return None
        is_float = numbers.dtype.is_floating_point
        return Codes(numbers if is_float else numbers.to(torch.int8), scales, block)

    def blocks(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int], block_format: str
    ) -> QuantizedWeight | None:
        scales = tensors["weight_scale"]
        if block_format == "float8":
            grid = scales.view(-1, 1) if scales.ndim < 2 else scales
            return float8_blocks(tensors["weight"], grid, self._block.of(shape))
        scales = scales.view(shape[0], -1)
        numbers, zeros = self._codes(tensors).int(), self._zeros(tensors, scales)
        if zeros is not None:
            numbers -= zeros.repeat_interleave(shape[1] // scales.shape[1], 1)
        return integer_blocks(numbers, scales, block_format)

    def _codes(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """[outputs, inputs], with 0 in the middle of the integers in words."""
        words = tensors.get("weight_packed")
        if words is None:
            return tensors["weight"]
        return unpack_words(words, self._bits) - (1 << self._bits - 1)

    def _zeros(self, tensors: Mapping[str, Tensor], scales: Tensor) -> Tensor | None:
        """The zero points, as many as scales; None if there are none."""
        zeros = tensors.get("weight_zero_point")
        if zeros is None:
            return None
        if zeros.numel() == scales.numel():
            return zeros.view(scales.shape)
        if "weight_packed" not in tensors:
            return zeros
        # Packed along the outputs.
        unpacked = unpack_words(zeros.t(), self._bits).t()[: len(scales)]
        return unpacked - (1 << self._bits - 1)


def scale_block(weights: Mapping[str, Any]) -> Block:
    """What shares a scale, as config.json describes the weights of a group. The strategy may be
    left to the size of groups. Raises `StartupError`."""
    size = weights.get("group_size")
    implied = "tensor" if size is None else "group" if size > 0 else "channel"
    strategy = weights.get("strategy") or implied
    if strategy == "tensor":
        return Block()
    if strategy == "channel":
        return Block(outputs=1)
    if strategy == "group" and size is not None and size > 0:
        return Block(outputs=1, inputs=size)
    if strategy == "block" and (structure := weights.get("block_structure")):
        sizes = structure.split("x") if isinstance(structure, str) else structure
        outputs, inputs = map(int, sizes)
        return Block(outputs, inputs)
    raise StartupError(
        f"the model's weights are quantized with compressed-tensors (strategy {strategy}, groups "
        f"of {size}), which is not supported"
    )
