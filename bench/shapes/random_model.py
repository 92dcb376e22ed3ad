"""A decoder with random weights of any native family, which no checkpoint has to hold."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from kernels.quantized import BLOCKS, QuantizedWeight
from worker.model.spec import ModelSpec, Norm
from worker.model.weights.formats.blocks import BlockWeight
from worker.model.weights.formats.dense import Dense
from worker.model.weights.formats.interface import Target
from worker.model.weights.layers import NormWeights, WeightReader
from worker.model.weights.weight import DenseWeight, Linear, Weight

_STD = 0.02
_POOL = 1 << 24
"""Matrices are parts of as many random numbers, because drawing each number takes minutes."""
_SCALES = {
    "q8_0": torch.tensor([_STD / 74], dtype=torch.float16).view(torch.uint8),
    "mxfp4": torch.tensor([119], dtype=torch.uint8),
}
"""What stands before the integers of a block. The standard deviation of a random byte is 74, and
the exponent has an offset of 127."""


@dataclass(slots=True)
class Held:
    """Matrices of a kind."""

    num_weights: int = 0
    num_bytes: int = 0

    def add(self, weight: Weight) -> None:
        self.num_weights += math.prod(weight.shape)
        self.num_bytes += weight.num_bytes


class RandomReader(WeightReader):
    """Random weights in place of a checkpoint's."""

    def __init__(self, spec: ModelSpec, weights: str) -> None:
        """``weights`` is bfloat16, q8_0, or mxfp4: the experts of mxfp4 beside other matrices of
        bfloat16, as in gpt-oss."""
        target = Target(torch.bfloat16, torch.device("cpu"), "native")
        super().__init__(_NoTensors(), spec, Dense(), target, vector_dtype=torch.float32)
        self._weights = weights
        self._floats = torch.empty(_POOL).normal_(std=_STD)
        self._of_experts = _pool(weights)
        self._of_others = _pool("bfloat16") if weights == "mxfp4" else self._of_experts
        self._num_taken = 0
        self.experts, self.head, self.others = Held(), Held(), Held()

    @cached_property
    def is_tied(self) -> bool:
        return self._spec.has_tied_embeddings

    def linear(
        self, names: Sequence[str], shape: tuple[int, int], *, has_bias: bool = False
    ) -> Linear:
        """See `WeightReader.linear`."""
        is_expert = ".experts." in names[0]
        weight = self._random(self._of_experts if is_expert else self._of_others, shape)
        (self.experts if is_expert else self.others).add(weight)
        return Linear(weight, self._vector([], shape[0]) if has_bias else None)

    def float_linear(
        self, names: Sequence[str], shape: tuple[int, int], *, has_bias: bool = False
    ) -> Linear:
        """See `WeightReader.float_linear`."""
        weight = DenseWeight(self._part(self._floats, math.prod(shape)).view(shape))
        self.others.add(weight)
        return Linear(weight, self._vector([], shape[0]) if has_bias else None)

    def stacked_floats(self, names: Sequence[str], shape: tuple[int, ...]) -> Tensor:
        """See `WeightReader.stacked_floats`."""
        return self._part(self._floats, math.prod(shape)).view(shape)

    def embedding(self) -> Weight:
        """See `WeightReader.embedding`."""
        return self._of_tokens(is_head=self.is_tied)

    def lm_head(self) -> Weight:
        """See `WeightReader.lm_head`."""
        return self._of_tokens(is_head=True)

    def check_complete(self) -> None:
        """Nothing can be missing."""

    def _of_tokens(self, *, is_head: bool) -> Weight:
        table = self._random(self._of_others, (self._spec.vocab_size, self._spec.hidden_size))
        if is_head:
            self.head.add(table)
        return table

    def _norm(self, name: str, spec: Norm, size: int) -> NormWeights:
        return NormWeights(torch.ones(size), torch.zeros(size) if spec.has_bias else None)

    def _vector(self, names: list[str], size: int) -> Tensor:
        return self._part(self._floats, size)

    def _random(self, pool: Tensor, shape: tuple[int, int]) -> Weight:
        outputs, inputs = shape
        if pool.ndim == 1:
            return DenseWeight(self._part(pool, outputs * inputs).view(shape))
        num_blocks = inputs // BLOCKS[self._weights].inputs
        blocks = self._part(pool, outputs * num_blocks).view(outputs, num_blocks, -1)
        return BlockWeight(QuantizedWeight(self._weights, blocks))

    def _part(self, pool: Tensor, size: int) -> Tensor:
        """So many elements of a pool, another part each time."""
        if size > len(pool):
            return torch.cat([pool] * -(-size // len(pool)))[:size]
        self._num_taken += 1
        start = self._num_taken * 1_000_003 % (len(pool) - size + 1)
        return pool[start : start + size]


def _pool(weights: str) -> Tensor:
    """Random weights: bfloat16 [any], or blocks of a format, uint8 [any, bytes of a block]."""
    if weights not in BLOCKS:
        return torch.empty(_POOL).normal_(std=_STD).to(getattr(torch, weights))
    size = BLOCKS[weights]
    blocks = torch.randint(256, (_POOL // size.inputs, size.num_bytes), dtype=torch.uint8)
    blocks[:, : len(_SCALES[weights])] = _SCALES[weights]
    return blocks


class _NoTensors:
    """A `TensorSource` without tensors."""

    container: ClassVar[str] = "none"
    directory: ClassVar[Path] = Path()
    dtype: ClassVar[torch.dtype] = torch.bfloat16
    names: ClassVar[list[str]] = []
    unread: ClassVar[list[str]] = []

    def has(self, name: str) -> bool:
        return False

    def kind(self, name: str) -> str:
        raise KeyError(name)

    def shape(self, name: str) -> tuple[int, ...]:
        raise KeyError(name)

    def get(self, name: str) -> Tensor:
        raise KeyError(name)

    def check_shape(self, names: list[str], shape: tuple[int, ...]) -> None:
        raise KeyError(names[0])

    def read(
        self, names: list[str], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        raise KeyError(names[0])
