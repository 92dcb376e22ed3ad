"""Moves many small arrays to a device in a single copy."""

from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True, slots=True)
class _Place:
    start: int
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Packed:
    """Arrays behind one another in host memory, ready for the one copy."""

    def __init__(self, arrays: dict[str, NDArray[Any]], device: torch.device) -> None:
        """Lay out ``arrays``, each int64, int32 or float32, on their way to ``device``."""
        self._device = device
        self._places: dict[str, _Place] = {}
        size = 0
        for name, array in arrays.items():
            self._places[name] = _Place(size, array.nbytes, _DTYPES[array.dtype], array.shape)
            size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        # Pinned memory comes from torch's cache, a ring that grows with the copies under way: it
        # gives none away again before the copy that reads it is done.
        self._host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        writable = self._host.numpy()
        for array, place in zip(arrays.values(), self._places.values(), strict=True):
            flat = np.ascontiguousarray(array).view(np.uint8).ravel()
            writable[place.start : place.start + place.num_bytes] = flat

    def send(self) -> dict[str, Tensor]:
        """The arrays as tensors on the device, under their names.

        Does not wait for the copy: work of the same stream that follows sees it done. On the CPU
        nothing is copied.
        """
        there = self._host.to(self._device, non_blocking=True)
        return {
            name: there[place.start : place.start + place.num_bytes]
            .view(place.dtype)
            .view(place.shape)
            for name, place in self._places.items()
        }
