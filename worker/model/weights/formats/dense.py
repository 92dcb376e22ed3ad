"""Matrices that are stored as floats."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from kernels.providers import Provider
from worker.model.weights.formats.interface import Format, Target
from worker.model.weights.sources import TensorSource
from worker.model.weights.weight import DenseWeight


class Dense(Format):
    """Floats of 16 or 32 bits, read as a single data type."""

    name: ClassVar[str] = "floats"
    kinds: ClassVar[str] = "of 16 and 32 bits"
    packed_for: ClassVar[frozenset[Provider]] = frozenset({"reference", "native", "triton"})

    @classmethod
    def detect(cls, config: Mapping[str, Any], source: TensorSource) -> Self:
        return cls()

    def read(
        self, source: TensorSource, names: list[str], shape: tuple[int, int], target: Target
    ) -> DenseWeight:
        return DenseWeight(source.read(names, shape, target.dtype, target.device))

    def num_bytes(self, source: TensorSource, target: Target) -> int:
        return num_elements(source) * target.dtype.itemsize


def num_elements(source: TensorSource) -> int:
    """The number of elements of all tensors."""
    return sum(math.prod(source.shape(name)) for name in source.names)
