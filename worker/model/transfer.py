"""Moves many small arrays to a device in a single copy."""

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


def transfer(arrays: dict[str, NDArray[Any]], device: torch.device) -> dict[str, Tensor]:
    """Return the arrays, int64, int32 or float32, as tensors on ``device``, under their names.

    Does not wait for the copy: work of the same stream that follows sees it done.
    """
    starts = []
    size = 0
    for array in arrays.values():
        starts.append(size)
        size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    # Pinned memory comes from torch's cache, which waits for copies that still read it.
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    writable = host.numpy()
    for start, array in zip(starts, arrays.values(), strict=True):
        writable[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()
    there = host.to(device, non_blocking=True)
    return {
        name: _view(there[start : start + array.nbytes], array)
        for start, (name, array) in zip(starts, arrays.items(), strict=True)
    }


def _view(data: Tensor, array: NDArray[Any]) -> Tensor:
    return data.view(_DTYPES[array.dtype]).view(array.shape)
