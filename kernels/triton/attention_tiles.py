"""How large the tiles of attention are, for each kind of layer."""

from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

from kernels.triton.configurations import POINTER_TYPES, Constexpr

MIN_ROWS = 16
"""The fewest that a matrix instruction takes."""


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """What a layer's kernels are specialised for."""

    dtype: torch.dtype
    head_dim: int
    group: int
    """Query heads that share one key head."""
    block_size: int
    has_window: bool
    target: int
    """Of `kernels.triton.configurations.TARGETS`, the one whose tiles suit the device."""

    @classmethod
    def of(cls, query: Tensor, key_cache: Tensor, sliding_window: int | None) -> "AttentionKind":
        _, num_heads, head_dim = query.shape
        _, block_size, num_kv_heads, _ = key_cache.shape
        group = num_heads // num_kv_heads
        return cls(
            query.dtype,
            head_dim,
            group,
            block_size,
            has_window=sliding_window is not None,
            target=_target(query.device),
        )

    @property
    def pointer(self) -> str:
        return POINTER_TYPES[self.dtype]

    @property
    def width(self) -> int:
        """head_dim filled up to a power of two: 80 and 96 are computed as 128."""
        return int(triton.next_power_of_2(self.head_dim))

    @property
    def signature(self) -> dict[str, str]:
        """The types of the arguments that decodes and prompts share."""
        return {
            **dict.fromkeys(("query_ptr", "key_ptr", "value_ptr"), self.pointer),
            "tables_ptr": "*i32:16",
            "lens_ptr": "*i32:16",
            "query_stride": "i32:16",
            "slot_stride": "i32:16",
            "table_stride": "i32",
            "scale": "fp32",
            "window": "i32",
        }

    @property
    def constexprs(self) -> dict[str, Constexpr]:
        return {
            "BLOCK_SIZE": self.block_size,
            "HEAD_DIM": self.head_dim,
            "GROUP": self.group,
            "HAS_WINDOW": self.has_window,
            "BLOCK_D": self.width,
        }


@dataclass(frozen=True, slots=True)
class Tile:
    """``rows`` of queries (a head of a token each) against ``keys`` tokens of context at a time."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    """Tiles of keys and values that are under way from memory at once."""


def decode_tile(kind: AttentionKind) -> Tile:
    """The heads of one group: memory is the limit, so what counts is what is under way."""
    rows = max(MIN_ROWS, int(triton.next_power_of_2(kind.group)))
    keys = min(128, 16384 // (kind.width * kind.dtype.itemsize))
    return Tile(rows, max(MIN_ROWS, keys), num_warps=4 if kind.width <= 128 else 8, num_stages=5)


def prefill_tile(kind: AttentionKind) -> Tile:
    """Tokens by heads of one group: arithmetic is the limit, so tiles fill the registers."""
    if kind.dtype == torch.float32:
        # Three products in place of one; a width of 256 does not quite fit the registers.
        return Tile(16, 32, num_warps=8, num_stages=2)
    rows, keys = _PREFILL_TILES[kind.target][max(64, kind.width)]
    return Tile(rows, keys, num_warps=8, num_stages=3)


_PREFILL_TILES = {
    80: {64: (128, 64), 128: (128, 32), 256: (64, 32)},
    90: {64: (128, 128), 128: (128, 128), 256: (128, 64)},
    100: {64: (128, 128), 128: (128, 128), 256: (128, 32)},
}
"""By target and width; what does not spill, and on 90 and 100 fills the wide instructions."""


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Of Triton's interpreter, which runs on the CPU: one."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _target(device: torch.device) -> int:
    """What is neither Hopper nor a data centre's Blackwell has Ampere's instructions, and no less
    memory than the smallest of that generation: 99 KiB for a block of threads."""
    if device.type != "cuda":
        return 80
    return {9: 90, 10: 100, 11: 100}.get(torch.cuda.get_device_capability(device)[0], 80)
