"""The KV cache, in blocks, and its size."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.native.huge_pages import allocate
from shared.errors import StartupError
from shared.host_memory import free_bytes as free_host_bytes
from worker.model.cache_layout import CacheLayout, LayerPlace, one_group

_CPU_SHARE = 0.15
"""The share of the memory that is free after loading the weights; activations need the rest."""


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The parameters that determine the size of a block."""

    num_layers: int
    """The number of layers whose tokens a block holds."""
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    has_values: bool = True
    """See `CacheLayout.has_values`."""

    @property
    def key_bytes(self) -> int:
        """The size of the keys of a block's layers."""
        elements = self.num_layers * self.block_size * self.num_kv_heads * self.head_dim
        return elements * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """The size of a block: keys and values of its layers."""
        return self.key_bytes * (2 if self.has_values else 1)


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values, each [num_places, num_blocks, block_size, num_kv_heads, head_dim]; the same
    tensor if a block has no values."""

    keys: Tensor
    values: Tensor
    layout: CacheLayout

    @classmethod
    def allocate(
        cls,
        block: BlockShape,
        num_blocks: int,
        device: torch.device,
        layout: CacheLayout | None = None,
    ) -> "KVCache":
        """Allocate the cache without clearing it, because every slot is written before it is read.

        Without a ``layout``, all layers keep all tokens. On the CPU the operating system commits
        pages at their first use. Raises `StartupError` if there is not enough memory.
        """
        layout = layout or one_group(block.num_layers)
        shape = (
            block.num_layers,
            num_blocks,
            block.block_size,
            block.num_kv_heads,
            block.head_dim,
        )
        try:
            if device.type == "cpu":
                num_bytes = num_blocks * block.key_bytes
                count = 2 if block.has_values else 1
                parts = [allocate(num_bytes).view(block.dtype).view(shape) for _ in range(count)]
                return cls(parts[0], parts[-1], layout)
            keys = torch.empty(shape, dtype=block.dtype, device=device)
            return cls(keys, torch.empty_like(keys) if block.has_values else keys, layout)
        except (MemoryError, RuntimeError) as error:
            raise StartupError(
                f"no memory for a KV cache of {num_blocks * block.num_bytes:,} bytes: set a "
                "smaller --kv-cache-bytes"
            ) from error

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Keys and values, or the tensor that is both."""
        return (self.keys,) if self.values is self.keys else (self.keys, self.values)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def num_blocks(self) -> int:
        return self.keys.shape[1]

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]

    @property
    def slot_bytes(self) -> int:
        """The size of a token's longest keys, or values, in a layer."""
        return self.keys[0, 0, 0].nbytes

    def group(self, layer: int) -> int:
        """The group of a layer, whose slots and block tables the layer uses."""
        return self._place(layer).group

    def layer(
        self, layer: int, num_kv_heads: int | None = None, head_dim: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, each [num_blocks, block_size, num_kv_heads, head_dim].

        A layer with shorter keys than the longest has as many more blocks; see
        `CacheLayout.key_blocks`.
        """
        place = self._place(layer).place
        keys, values = self.keys[place], self.values[place]
        shape = (self.block_size, num_kv_heads or keys.shape[2], head_dim or keys.shape[3])
        if shape == keys.shape[1:]:
            return keys, values
        num_blocks = keys.numel() // math.prod(shape)
        size = num_blocks * math.prod(shape)
        return (
            keys.view(-1)[:size].view(num_blocks, *shape),
            values.view(-1)[:size].view(num_blocks, *shape),
        )

    def first_piece(self, layer: int) -> int:
        """Where the states of a layer begin; see `CacheLayout.states`."""
        first = self.layout.states[layer]
        assert first is not None, "the layer has no state"
        return first

    def _place(self, layer: int) -> LayerPlace:
        place = self.layout.places[layer]
        assert place is not None, "the layer has no keys and values"
        return place


def num_blocks_for(
    block: BlockShape,
    *,
    kv_cache_bytes: int | None,
    free_bytes: int,
    max_num_blocks: int,
    min_num_blocks: int = 1,
) -> int:
    """The number of blocks to allocate: as many as fit into ``kv_cache_bytes``.

    Without it, as many as fit into ``free_bytes``, but no more than ``max_num_blocks``. Raises
    `StartupError` if not even ``min_num_blocks`` fit, which the first tokens of a sequence need.
    """
    if kv_cache_bytes is not None:
        num_blocks = kv_cache_bytes // block.num_bytes
    else:
        num_blocks = min(max_num_blocks, free_bytes // block.num_bytes)
    if num_blocks < min_num_blocks:
        raise StartupError(_too_small(block, min_num_blocks, kv_cache_bytes, free_bytes))
    return num_blocks


def _too_small(
    block: BlockShape, min_num_blocks: int, kv_cache_bytes: int | None, free_bytes: int
) -> str:
    needed = f"{min_num_blocks * block.num_bytes:,} bytes for its first {block.block_size} tokens"
    if kv_cache_bytes is not None:
        return f"the KV cache needs {needed}, but has {kv_cache_bytes:,}: raise --kv-cache-bytes"
    return (
        f"the KV cache needs {needed}, but {free_bytes:,} bytes of memory are left for it: free "
        "memory, choose a smaller model or weight format, or set --kv-cache-bytes"
    )


def cpu_bytes() -> int:
    """The bytes that a cache may use of the machine's, or the container's, free memory."""
    return int(free_host_bytes() * _CPU_SHARE)
