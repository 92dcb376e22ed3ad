"""Allocates memory that every step reads or writes."""

import math
import mmap
import os
import threading

import torch
from torch import Tensor

from kernels.native.library import Library

_PIECE_BYTES = 2 << 20
_AHEAD_BYTES = 4 * _PIECE_BYTES
_NICENESS = 5
"""The computing threads come first. With the lowest priority, the thread could keep the
interpreter's lock while other processes use the cores."""


def allocate(num_bytes: int) -> Tensor:
    """Return zeros, uint8 [num_bytes], in huge pages if the system supports them.

    Huge pages reduce TLB misses. They are committed at their first use. Raises `MemoryError`.
    """
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for {num_bytes} bytes") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class CommittedAhead:
    """Tensors [num_layers, ...] whose memory is committed shortly before it is used.

    The first write to a page waits until the system has cleared it, which takes 0.1 s for a step
    that starts new pages in every layer. Threads of lower priority therefore commit memory ahead of
    its use, but no more than will soon be needed.
    """

    def __init__(self, library: Library, *caches: Tensor) -> None:
        self._library = library
        self._layers = [layer for cache in caches for layer in cache]
        self._end = 0

    def use(self, num_bytes: int) -> threading.Thread | None:
        """Mark ``num_bytes`` of each layer as used; returns the committing thread, if any."""
        start = self._end
        pieces = math.ceil((num_bytes + _AHEAD_BYTES) / _PIECE_BYTES)
        end = min(pieces * _PIECE_BYTES, self._layers[0].nbytes)
        if end <= start:
            return None
        self._end = end
        thread = threading.Thread(
            target=self._commit, args=(start, end), name="commit", daemon=True
        )
        thread.start()
        return thread

    def _commit(self, start: int, end: int) -> None:
        """Commit the range piece by piece in all layers, because they fill up at the same rate."""
        os.nice(_NICENESS)  # on Linux it concerns the calling thread alone
        for piece in range(start, end, _PIECE_BYTES):
            num_bytes = min(_PIECE_BYTES, end - piece)
            for layer in self._layers:
                self._library.functions.warren_commit(layer.data_ptr() + piece, num_bytes)
