"""A checkpoint as the headers of its files describe it: names and shapes, without the data."""

import math
from pathlib import Path

import torch
from torch import Tensor

from worker.model.weights.sources import TensorSource

_WITHOUT_DATA = torch.device("meta")


class HeaderSource:
    """A `TensorSource` whose tensors are on the meta device, so that a large checkpoint is checked
    in moments. Only single numbers are read."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self._unread = set(source.names)

    @property
    def container(self) -> str:
        return self._source.container

    @property
    def directory(self) -> Path:
        return self._source.directory

    @property
    def dtype(self) -> torch.dtype:
        return self._source.dtype

    @property
    def names(self) -> list[str]:
        return self._source.names

    @property
    def unread(self) -> list[str]:
        return sorted(self._unread)

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def kind(self, name: str) -> str:
        return self._source.kind(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def get(self, name: str) -> Tensor:
        shape = self.shape(name)
        self._unread.discard(name)
        if math.prod(shape) == 1:
            return self._source.get(name)
        return torch.empty(shape, device=_WITHOUT_DATA)

    def check_shape(self, names: list[str], shape: tuple[int, ...]) -> None:
        self._source.check_shape(names, shape)

    def read(
        self, names: list[str], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """The tensors that are named, without data on any device."""
        self.check_shape(names, shape)
        self._unread.difference_update(names)
        return torch.empty(shape, dtype=dtype, device=_WITHOUT_DATA)
