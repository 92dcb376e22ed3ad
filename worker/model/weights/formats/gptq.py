"""Checkpoints of GPTQ (Frantar et al., arXiv:2210.17323): integers of 4 or 8 bits with a scale and
a zero point for each group of inputs."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from kernels.providers import Provider
from kernels.quantized import QuantizedWeight
from shared.errors import StartupError
from worker.model.weights.formats.coded import (
    INTEGER_BLOCKS,
    Coded,
    are_whole_blocks,
    check_finite,
    check_group_size,
    declared,
    holds,
    integer_blocks,
    method_of,
)
from worker.model.weights.formats.device_weights import Codes, bytes_on_device
from worker.model.weights.sources import TensorSource

_WORD_BITS = 32


class Gptq(Coded):
    """Words of codes for neighbouring inputs, transposed. ``g_idx`` is the group of each input,
    which may be in any order (act-order)."""

    name: ClassVar[str] = "GPTQ"
    kinds: ClassVar[str] = "4 and 8 bits, also with act-order"
    packed_for: ClassVar[frozenset[Provider]] = frozenset({"native", "triton"})
    bytes_per_weight: ClassVar[str] = "0.56 (4 bits), 0.69 (4, with zero points), 1.06 (8)"
    numerics: ClassVar[str] = "fused integers ordered"
    suffixes: ClassVar[frozenset[str]] = frozenset({"qweight", "qzeros", "scales", "g_idx"})

    def __init__(
        self, bits: int, zero_offset: int, *, is_symmetric: bool, group_size: int | None
    ) -> None:
        """``zero_offset`` is what a stored zero point lacks: 1 except in version 2 of the
        layout."""
        self._bits = bits
        self._zero_offset = zero_offset
        self._blocks = INTEGER_BLOCKS.get((bits, not is_symmetric))
        self._group_size = group_size

    @classmethod
    def detect(cls, config: Mapping[str, Any], source: TensorSource) -> Self | None:
        if method_of(config) != "gptq":
            return None
        described = declared(config) or {}
        bits, layout = described.get("bits"), described.get("checkpoint_format") or "gptq"
        if bits not in (4, 8) or layout not in ("gptq", "gptq_v2"):
            raise StartupError(
                f"the model's weights are quantized with gptq (bits {bits}, layout {layout}), "
                "which is not supported: only 4 and 8 bits are"
            )
        return cls(
            bits,
            0 if layout == "gptq_v2" else 1,
            is_symmetric=bool(described.get("sym", True)),
            group_size=described.get("group_size"),
        )

    def is_coded(self, source: TensorSource, stem: str) -> bool:
        return source.has(f"{stem}qweight")

    def shape(self, source: TensorSource, stem: str) -> tuple[int, int]:
        words, outputs = source.shape(f"{stem}qweight")
        return outputs, words * _WORD_BITS // self._bits

    def decoder(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int]
    ) -> Callable[[], Tensor]:
        scales, (outputs, inputs) = tensors["scales"], shape
        check_finite(scales)
        num_groups = len(scales)
        if scales.shape[1:] != (outputs,) or not num_groups:
            raise ValueError(f"scales have the shape {tuple(scales.shape)}")
        expected = (num_groups, outputs * self._bits // _WORD_BITS)
        if tuple(tensors["qzeros"].shape) != expected:
            raise ValueError(f"qzeros has the shape {tuple(tensors['qzeros'].shape)}")
        groups = tensors.get("g_idx")
        check_group_size(inputs, num_groups, self._group_size, are_equal=groups is None)
        if groups is None:
            if inputs % num_groups:
                raise ValueError(f"{inputs} inputs in {num_groups} groups")
            groups = _in_order(inputs, num_groups, scales.device)
        elif groups.shape != (inputs,) or not holds(
            groups, lambda values: (values >= 0) & (values < num_groups)
        ):
            raise ValueError("g_idx names groups that do not exist, or not one for each input")
        index = groups.long()

        def decode() -> Tensor:
            numbers = self._numbers(tensors, index)
            return (numbers.float() * scales.float()[index]).t().contiguous()

        return decode

    def block_format(self, source: TensorSource, stem: str) -> str | None:
        num_groups = source.shape(f"{stem}scales")[0]
        _, inputs = self.shape(source, stem)
        return self._blocks if are_whole_blocks(inputs, num_groups) else None

    def device_bytes(self, source: TensorSource, stem: str) -> float | None:
        num_groups, (_, inputs) = source.shape(f"{stem}scales")[0], self.shape(source, stem)
        return bytes_on_device(inputs, self._bits, (1, -(-inputs // max(1, num_groups))))

    def device_codes(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Codes | None:
        scales, (_, inputs) = tensors["scales"], shape
        groups = _in_order(inputs, len(scales), scales.device)
        if "g_idx" in tensors and not torch.equal(tensors["g_idx"].long(), groups):
            return None  # act-order
        numbers = unpack_words(tensors["qweight"].t(), self._bits)
        zeros = (unpack_words(tensors["qzeros"], self._bits) + self._zero_offset).t()
        block = (1, inputs // len(scales))
        if self._bits == 4:
            return Codes(numbers.to(torch.uint8), scales.t(), block, zeros.to(torch.uint8))
        middle = 1 << self._bits - 1
        if not bool((zeros == middle).all()):
            return None
        return Codes((numbers - middle).to(torch.int8), scales.t(), block)

    def blocks(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int], block_format: str
    ) -> QuantizedWeight | None:
        scales, order = tensors["scales"], self.order(tensors, shape)
        groups = _in_order(shape[1], len(scales), scales.device)
        if order is None:
            numbers = self._numbers(tensors, groups)
        else:
            stored = tensors["g_idx"].long()
            if not torch.equal(stored[order], groups):
                return None  # groups of different sizes
            numbers = self._numbers(tensors, stored)[order]
        return integer_blocks(numbers.t(), scales.t(), block_format)

    def order(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor | None:
        """The inputs of each group in their order, one group after another."""
        groups, num_groups = tensors.get("g_idx"), len(tensors["scales"])
        if groups is None or torch.equal(
            groups.long(), _in_order(shape[1], num_groups, groups.device)
        ):
            return None
        return groups.argsort(stable=True).int()

    def _numbers(self, tensors: Mapping[str, Tensor], groups: Tensor) -> Tensor:
        """The codes less the zero points of their inputs' groups, [inputs, outputs] int32."""
        codes = unpack_words(tensors["qweight"].t(), self._bits).t()
        zeros = unpack_words(tensors["qzeros"], self._bits) + self._zero_offset
        return codes - zeros[groups]


def _in_order(inputs: int, num_groups: int, device: torch.device) -> Tensor:
    """The group of each input, if neighbouring inputs form groups of equal sizes."""
    return torch.arange(inputs, device=device) // (inputs // num_groups)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """The codes in words of 32 bits, the lowest first: [rows, codes] int32."""
    shifts = torch.arange(0, _WORD_BITS, bits, dtype=torch.int32, device=words.device)
    return (words.unsqueeze(-1) >> shifts & (1 << bits) - 1).flatten(1)
