"""Matrices that a decoder uses in another form than a checkpoint stores them, of floats and of
packed weights."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.errors import StartupError
from worker.model.weights.formats.coded import FLOATS, CodedWeight
from worker.model.weights.sources import TensorSource
from worker.model.weights.weight import Weight

ReadMatrix = Callable[[str, tuple[int, int]], Weight]
"""Reads a stored matrix of this shape in the format of the checkpoint."""


class Rearranged(ABC):
    """A tensor that is made from the tensor ``name`` of a checkpoint."""

    name: str

    @abstractmethod
    def __call__(self, source: TensorSource) -> Tensor:
        """The tensor, if floats are stored. Raises `StartupError` for another shape."""

    @abstractmethod
    def num_outputs(self) -> int:
        """The length of the first dimension."""

    @abstractmethod
    def weight(self, read: ReadMatrix, inputs: int) -> Weight:
        """The matrix [num_outputs, inputs], if it is packed."""

    def is_packed(self, source: TensorSource) -> bool:
        """Whether the checkpoint does not store floats under this name."""
        return not source.has(self.name) or source.kind(self.name) not in FLOATS


@dataclass(frozen=True, slots=True)
class SelectedRows(Rearranged):
    """Some rows of a matrix or vector, or all rows in another order. A packed matrix stays packed:
    no format has codes or scales that depend on the order of outputs."""

    name: str
    rows: Tensor
    """[num_outputs] int64."""
    num_rows: int
    """Of the stored tensor."""

    def __call__(self, source: TensorSource) -> Tensor:
        stored = source.get(self.name)
        if len(stored) != self.num_rows:
            raise StartupError(
                f"{self.name} has {len(stored)} rows, config.json says {self.num_rows}"
            )
        return stored[self.rows]

    def num_outputs(self) -> int:
        return len(self.rows)

    def is_packed(self, source: TensorSource) -> bool:
        """A tensor of ggml's blocks has its rows in its first dimension, as a tensor of floats."""
        is_in_rows = source.container == "GGUF" and source.has(self.name)
        return not is_in_rows and Rearranged.is_packed(self, source)

    def weight(self, read: ReadMatrix, inputs: int) -> Weight:
        return read(self.name, (self.num_rows, inputs)).selected(self.rows)


@dataclass(frozen=True, slots=True)
class HeadMatrices(Rearranged):
    """The same rows of each head of a matrix [num_heads * size, inputs], one head after another; if
    transposed, [num_heads * inputs, rows of a head].

    A packed matrix is expanded: the inputs that share a scale become outputs in a transposed
    matrix, and a device without packed kernels would expand each head in each step.
    """

    name: str
    num_heads: int
    size: int
    """The number of stored rows of a head."""
    inputs: int
    rows: slice
    """The rows of a head."""
    is_transposed: bool = False

    def __call__(self, source: TensorSource) -> Tensor:
        source.check_shape([self.name], self._stored_shape)
        return self._of(source.get(self.name))

    def num_outputs(self) -> int:
        num_rows = len(range(*self.rows.indices(self.size)))
        return self.num_heads * (self.inputs if self.is_transposed else num_rows)

    def weight(self, read: ReadMatrix, inputs: int) -> Weight:
        stored = read(self.name, self._stored_shape)
        return CodedWeight(
            (self.num_outputs(), inputs),
            stored.num_bytes,
            lambda: self._of(stored.dense(torch.float32)),
        )

    @property
    def _stored_shape(self) -> tuple[int, int]:
        return self.num_heads * self.size, self.inputs

    def _of(self, stored: Tensor) -> Tensor:
        heads = stored.view(self.num_heads, self.size, self.inputs)[:, self.rows]
        return (heads.transpose(1, 2) if self.is_transposed else heads).flatten(0, 1)
