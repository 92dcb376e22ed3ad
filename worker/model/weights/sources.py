"""Where tensors come from: the protocol of a checkpoint on disk."""

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor


class TensorSource(Protocol):
    """Named tensors on disk, by the names that they have in Hugging Face's checkpoints.

    Methods raise `StartupError` if a tensor is missing or has another shape.
    """

    @property
    def directory(self) -> Path: ...

    @property
    def dtype(self) -> torch.dtype:
        """The data type in which the model is served unless another one is asked for. Raises
        `StartupError` if there is none."""
        ...

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        ...

    @property
    def unread(self) -> list[str]:
        """The names of the tensors that have not been read."""
        ...

    def has(self, name: str) -> bool: ...

    def kind(self, name: str) -> str:
        """How a tensor's elements are stored, such as BF16 or I32."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape in which a tensor is stored."""
        ...

    def get(self, name: str) -> Tensor:
        """A tensor as stored."""
        ...

    def parts(self, names: list[str], shape: tuple[int, ...]) -> list[Tensor]:
        """The named tensors as stored, not yet read from disk; [*shape] if stacked."""
        ...

    def read(
        self, names: list[str], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """The named tensors stacked, [*shape] in total."""
        ...
