"""Memory that every step walks through."""

import mmap
import os
import threading

import torch
from torch import Tensor

from kernels.native.library import Library

_PIECE_BYTES = 2 << 20


def allocate(num_bytes: int) -> Tensor:
    """Return uint8 [num_bytes] of zeros, in huge pages where the system has them.

    Fewer pages are found faster. They are committed at their first use. Raises `MemoryError`.
    """
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for {num_bytes} bytes") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def commit_behind(library: Library, *caches: Tensor) -> threading.Thread:
    """Have a thread that runs while nobody else does commit [num_layers, ...] tensors; return it.

    The first to write to a page waits until the system has cleared it: 0.1 s for a step that
    begins new pages in every layer. All layers come along together, as they are used.
    """
    thread = threading.Thread(target=_commit, args=(library, caches), name="commit", daemon=True)
    thread.start()
    return thread


def _commit(library: Library, caches: tuple[Tensor, ...]) -> None:
    os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
    layers = [layer for cache in caches for layer in cache]
    num_bytes = layers[0].nbytes
    for start in range(0, num_bytes, _PIECE_BYTES):
        for layer in layers:
            piece = min(_PIECE_BYTES, num_bytes - start)
            library.functions.warren_commit(layer.data_ptr() + start, piece)
