"""The protocol of a format of weights."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from kernels.providers import Provider
from worker.model.weights.sources import TensorSource
from worker.model.weights.weight import Weight


@dataclass(frozen=True, slots=True)
class Target:
    """What weights are read for: floats become ``dtype``, and everything is moved to ``device``,
    where the operations are the provider's."""

    dtype: torch.dtype
    device: torch.device
    provider: Provider = "reference"


class Format(ABC):
    """How a checkpoint stores its matrices."""

    name: ClassVar[str]
    kinds: ClassVar[str]
    """The variants that are read, for the documentation."""
    packed_for: ClassVar[frozenset[Provider]] = frozenset()
    """The providers that multiply matrices as they are stored; for others they are expanded."""
    bytes_per_weight: ClassVar[str] = "those of the data type"
    """The memory for a weight, for the documentation."""
    numerics: ClassVar[str] = "fused"
    """The name of the native decoder's arithmetic with such weights. A format whose matrices an
    older version expanded has another name."""
    stacked_parts: ClassVar[Mapping[str, str]] = {}
    """The endings of the names of tensors that together hold the matrices of all experts, the
    experts first, then their outputs, and what each is called for a matrix stored by itself. Empty
    if a matrix has to be stored by itself."""

    @classmethod
    @abstractmethod
    def detect(cls, config: Mapping[str, Any], source: TensorSource) -> Self | None:
        """The format, as config.json describes it; None if the checkpoint has another format.

        Raises `StartupError` for a variant that is not supported.
        """

    def dtype(self, source: TensorSource, device: torch.device) -> torch.dtype:
        """The data type in which the model is served unless the settings name another. Raises
        `StartupError` if there is no such type."""
        return source.dtype

    @abstractmethod
    def read(
        self, source: TensorSource, names: list[str], shape: tuple[int, int], target: Target
    ) -> Weight:
        """The named matrices stacked, [sum of outputs, inputs].

        Raises `StartupError` for a missing tensor, a wrong shape or values that no matrix has.
        """

    def read_table(
        self, source: TensorSource, name: str, shape: tuple[int, int], target: Target
    ) -> Weight:
        """The embedding or output projection, [vocab_size, hidden_size]. Raises `StartupError`."""
        return self.read(source, [name], shape, target)

    @abstractmethod
    def num_bytes(self, source: TensorSource, target: Target) -> int:
        """The memory for all weights of a checkpoint."""
