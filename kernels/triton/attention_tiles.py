"""Tile sizes of attention for each kind of layer."""

from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

from kernels.attention_spec import AttentionSpec
from kernels.triton.attention_schedule import View
from kernels.triton.configurations import POINTER_TYPES, has_pdl, pdl_targets, tile_target

MIN_ROWS = 16
"""The minimum number of rows of a matrix instruction."""


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """The parameters that a layer's kernels are specialized for."""

    dtype: torch.dtype
    head_dim: int
    group: int
    """The number of query heads that share a key head."""
    block_size: int
    view: View
    target: int
    """The entry of `kernels.triton.configurations.TARGETS` whose tiles suit the device."""
    has_pdl: bool
    """See `kernels.triton.configurations.has_pdl`."""
    has_cap: bool = False
    has_slopes: bool = False
    has_sinks: bool = False
    tail_dim: int = 0
    """The last elements of keys that are no values; 0 if there are values beside the keys."""

    @classmethod
    def of(cls, query: Tensor, key_cache: Tensor, spec: AttentionSpec) -> "AttentionKind":
        _, num_heads, head_dim = query.shape
        _, block_size, num_kv_heads, _ = key_cache.shape
        group = num_heads // num_kv_heads
        return cls(
            query.dtype,
            head_dim,
            group,
            block_size,
            view=view_of(spec),
            target=tile_target(query.device),
            has_pdl=has_pdl(query.device),
            has_cap=spec.softcap is not None,
            has_slopes=spec.slopes is not None,
            has_sinks=spec.sinks is not None,
            tail_dim=0 if spec.value_dim is None else head_dim - spec.value_dim,
        )

    @property
    def targets(self) -> tuple[int, ...]:
        """All targets of kernels whose tiles are the same for each."""
        return pdl_targets(self.has_pdl)

    @property
    def pointer(self) -> str:
        return POINTER_TYPES[self.dtype]

    @property
    def value_dim(self) -> int:
        return self.head_dim - self.tail_dim

    @property
    def width(self) -> int:
        """value_dim rounded up to a power of two: 80 and 96 are computed as 128."""
        return int(triton.next_power_of_2(self.value_dim))

    @property
    def tail_width(self) -> int:
        """tail_dim rounded up to a power of two that a matrix instruction multiplies."""
        return max(MIN_ROWS, int(triton.next_power_of_2(self.tail_dim)))

    @property
    def signature(self) -> dict[str, str]:
        """The types of the arguments that describe the layer."""
        return {
            **dict.fromkeys(("query_ptr", "key_ptr", "value_ptr"), self.pointer),
            "slopes_ptr": "*fp32:16",
            "tables_ptr": "*i32:16",
            "lens_ptr": "*i32:16",
            "query_stride": "i32:16",
            "slot_stride": "i32:16",
            "table_stride": "i32",
            "scale": "fp32",
            "window": "i32",
            "softcap": "fp32",
        }


def view_of(spec: AttentionSpec) -> View:
    """Raises `ValueError` for chunks with a window."""
    if spec.chunk is None:
        return "all" if spec.window is None else "window"
    if spec.window is not None:
        raise ValueError(f"chunks of {spec.chunk} tokens and a window of {spec.window}")
    return "chunk"


@dataclass(frozen=True, slots=True)
class Tile:
    """``rows`` of queries (each a head of a token) by ``keys`` tokens of context."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    """The number of tiles of keys and values that are loaded ahead."""


@cache
def decode_tile(kind: AttentionKind, *, is_batch_invariant: bool) -> Tile:
    """A group of heads. Memory bandwidth is the limit. With two stages more programs fit on a
    multiprocessor, which was faster on an H100 than to load further ahead, and so do two warps, for
    whose registers float32 and batch-invariant sums are too large."""
    rows = max(MIN_ROWS, int(triton.next_power_of_2(kind.group)))
    if kind.width > _MAX_NARROW:
        return _wide_tile(kind, min(rows, _WIDE_ROWS))
    keys = min(128, 16384 // (kind.width * kind.dtype.itemsize))
    is_small = kind.dtype.itemsize == 2 and not is_batch_invariant
    num_warps = {64: 4, 128: 2 if is_small else 4, 256: 8}[max(64, kind.width)]
    return Tile(rows, max(MIN_ROWS, keys), num_warps, num_stages=2)


@cache
def prefill_tile(kind: AttentionKind) -> Tile:
    """Tokens times the heads of a group. Arithmetic is the limit, so tiles fill the registers."""
    if kind.width > _MAX_NARROW:
        return _wide_tile(kind, _WIDE_ROWS)
    if kind.dtype == torch.float32:
        # Three products instead of one; a width of 256 just exceeds the registers.
        return Tile(16, 32, num_warps=8, num_stages=2)
    return _PREFILL_TILES[kind.target][max(64, kind.width)]


def _wide_tile(kind: AttentionKind, rows: int) -> Tile:
    """Registers and shared memory are the limit: a tile of keys has 16 or 32 KiB, and so has a tile
    of values."""
    if kind.dtype == torch.float32:
        return Tile(MIN_ROWS, MIN_ROWS, num_warps=8, num_stages=1)
    keys = MIN_ROWS if kind.target == 80 else 32
    return Tile(rows, keys, num_warps=8, num_stages=2)


_WIDE_ROWS = 32
"""The most rows of a wide tile: 64 rows do not fit the registers of eight warps."""
_MAX_NARROW = 256
"""The widest values whose tiles were measured."""
_PREFILL_TILES = {
    80: {64: Tile(128, 64, 8, 3), 128: Tile(128, 32, 8, 3), 256: Tile(64, 32, 8, 3)},
    90: {64: Tile(128, 128, 8, 3), 128: Tile(128, 64, 4, 3), 256: Tile(128, 64, 8, 3)},
    100: {64: Tile(128, 128, 8, 3), 128: Tile(128, 128, 8, 3), 256: Tile(128, 32, 8, 3)},
}
"""The tiles by target and width. They do not spill and, on 90 and 100, fill the wide instructions.

The tile of width 128 on 90 does spill, but was the fastest of ten on an H100: two programs run at a
time, and one computes the softmax while the other multiplies.
"""


@cache
def num_multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors; four for Triton's interpreter, which runs on the CPU."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
