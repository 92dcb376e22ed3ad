"""Checkpoints of GPTQ (Frantar et al., arXiv:2210.17323): integers of 4 or 8 bits with a scale and
a zero point for each group of inputs."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from shared.errors import StartupError
from worker.model.weights.formats.coded import Coded, check_finite, declared, method_of
from worker.model.weights.sources import TensorSource

_WORD_BITS = 32


class Gptq(Coded):
    """Words of codes for neighbouring inputs, transposed. ``g_idx`` is the group of each input,
    which may be in any order (act-order)."""

    name: ClassVar[str] = "GPTQ"
    kinds: ClassVar[str] = "4 and 8 bits, also with act-order"
    suffixes: ClassVar[frozenset[str]] = frozenset({"qweight", "qzeros", "scales", "g_idx"})

    def __init__(self, bits: int, zero_offset: int) -> None:
        """``zero_offset`` is what a stored zero point lacks: 1 except in version 2 of the
        layout."""
        self._bits = bits
        self._zero_offset = zero_offset

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
        return cls(bits, 0 if layout == "gptq_v2" else 1)

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
        if groups is None:
            if inputs % num_groups:
                raise ValueError(f"{inputs} inputs in {num_groups} groups")
            groups = torch.arange(inputs, device=scales.device) // (inputs // num_groups)
        elif groups.shape != (inputs,) or groups.min() < 0 or groups.max() >= num_groups:
            raise ValueError("g_idx names groups that do not exist, or not one for each input")
        index = groups.long()

        def decode() -> Tensor:
            codes = unpack_words(tensors["qweight"].t(), self._bits).t()
            zeros = unpack_words(tensors["qzeros"], self._bits) + self._zero_offset
            return ((codes - zeros[index]).float() * scales.float()[index]).t().contiguous()

        return decode


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """The codes in words of 32 bits, the lowest first: [rows, codes] int32."""
    shifts = torch.arange(0, _WORD_BITS, bits, dtype=torch.int32, device=words.device)
    return (words.unsqueeze(-1) >> shifts & (1 << bits) - 1).flatten(1)
