"""Copies many small arrays to a device in a single transfer."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 16
_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
}


class _Place(NamedTuple):
    """The location of an array, in its own elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int


class Packed:
    """Arrays concatenated in host memory, ready for a single copy."""

    def __init__(self, arrays: dict[str, NDArray[Any]], device: torch.device) -> None:
        """Lay out ``arrays``, each int64, int32 or float32, for ``device``."""
        self._device = device
        self._places: dict[str, _Place] = {}
        packed: list[tuple[int, NDArray[Any]]] = []
        size = 0
        for name, array in arrays.items():
            flat = np.ascontiguousarray(array)
            item = flat.itemsize
            strides = tuple(stride // item for stride in flat.strides)
            self._places[name] = _Place(_DTYPES[flat.dtype], flat.shape, strides, size // item)
            packed.append((size, flat.view(np.uint8).ravel()))
            size += -(-flat.nbytes // _ALIGNMENT) * _ALIGNMENT
        # Pinned memory comes from torch's caching allocator, which does not reuse a block before
        # the copy that reads it has completed.
        self._host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        writable = self._host.numpy()
        for start, data in packed:
            writable[start : start + len(data)] = data

    def send(self) -> dict[str, Tensor]:
        """The arrays as tensors on the device, by name.

        Asynchronous: later work on the same stream sees the copy completed. On the CPU nothing is
        copied.
        """
        there = self._host.to(self._device, non_blocking=True)
        views = {dtype: there.view(dtype) for dtype in _DTYPES.values()}
        return {
            name: views[dtype].as_strided(shape, strides, start)
            for name, (dtype, shape, strides, start) in self._places.items()
        }
