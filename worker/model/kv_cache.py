"""The KV cache, in blocks, and its size."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.native.huge_pages import allocate
from shared.errors import StartupError
from shared.host_memory import free_bytes as free_host_bytes

_CPU_SHARE = 0.15
"""The share of the memory that is free after loading the weights; activations need the rest."""


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The parameters that determine the size of a block."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """The size of one block: keys and values of all layers."""
        elements = self.num_layers * self.block_size * self.num_kv_heads * self.head_dim
        return 2 * elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values, each [num_layers, num_blocks, block_size, num_kv_heads, head_dim]."""

    keys: Tensor
    values: Tensor

    @classmethod
    def allocate(cls, block: BlockShape, num_blocks: int, device: torch.device) -> "KVCache":
        """Allocate the cache without clearing it, because every slot is written before it is read.

        On the CPU the operating system commits pages at their first use. Raises `StartupError` if
        there is not enough memory.
        """
        shape = (
            block.num_layers,
            num_blocks,
            block.block_size,
            block.num_kv_heads,
            block.head_dim,
        )
        try:
            if device.type == "cpu":
                num_bytes = num_blocks * block.num_bytes // 2
                keys, values = (allocate(num_bytes).view(block.dtype).view(shape) for _ in range(2))
                return cls(keys, values)
            keys = torch.empty(shape, dtype=block.dtype, device=device)
            return cls(keys, torch.empty_like(keys))
        except (MemoryError, RuntimeError) as error:
            raise StartupError(
                f"no memory for a KV cache of {num_blocks * block.num_bytes:,} bytes: set a "
                "smaller --kv-cache-bytes"
            ) from error

    @property
    def num_blocks(self) -> int:
        return self.keys.shape[1]

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]

    @property
    def slot_bytes(self) -> int:
        """The size of one token's keys, or values, in one layer."""
        return self.keys[0, 0, 0].nbytes

    def layer(
        self, index: int, num_kv_heads: int | None = None, head_dim: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each [num_blocks, block_size, num_kv_heads, head_dim].

        A layer with smaller keys than the largest uses the beginning of its memory.
        """
        shape = (*self.keys.shape[1:3], num_kv_heads or self.keys.shape[3])
        shape = (*shape, head_dim or self.keys.shape[4])
        if shape == self.keys.shape[1:]:
            return self.keys[index], self.values[index]
        size = math.prod(shape)
        return (
            self.keys[index].view(-1)[:size].view(shape),
            self.values[index].view(-1)[:size].view(shape),
        )


def num_blocks_for(
    block: BlockShape,
    *,
    kv_cache_bytes: int | None,
    free_bytes: int,
    max_num_seqs: int,
    max_seq_len: int,
) -> int:
    """The number of blocks to allocate: as many as fit into ``kv_cache_bytes``.

    Without it, as many as fit into ``free_bytes``, but no more than ``max_num_seqs`` sequences of
    ``max_seq_len`` tokens can fill. Raises `StartupError` if not one block fits.
    """
    if kv_cache_bytes is not None:
        num_blocks = kv_cache_bytes // block.num_bytes
    else:
        most = max_num_seqs * math.ceil(max_seq_len / block.block_size)
        num_blocks = min(most, free_bytes // block.num_bytes)
    if num_blocks < 1:
        raise StartupError(_too_small(block, kv_cache_bytes, free_bytes))
    return num_blocks


def _too_small(block: BlockShape, kv_cache_bytes: int | None, free_bytes: int) -> str:
    needed = f"{block.num_bytes:,} bytes for its first {block.block_size} tokens"
    if kv_cache_bytes is not None:
        return f"the KV cache needs {needed}, but has {kv_cache_bytes:,}: raise --kv-cache-bytes"
    return (
        f"the KV cache needs {needed}, but {free_bytes:,} bytes of memory are left for it: free "
        "memory, choose a smaller model or weight format, or set --kv-cache-bytes"
    )


def cpu_bytes() -> int:
    """The bytes that a cache may use of the machine's, or the container's, free memory."""
    return int(free_host_bytes() * _CPU_SHARE)
