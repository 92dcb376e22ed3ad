"""Which of a model's layers share block tables, and where in a block a layer's tokens are, or its
state."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from kernels.providers import TILE_TOKENS, Provider
from worker.engine.cache.layout import (
    ONE_FULL,
    CacheGroup,
    ChunkCache,
    FullCache,
    LatentCache,
    StateCache,
    WindowCache,
)
from worker.model.spec import ModelSpec

_MAX_GROUPS = 8
"""Each group adds a block table to every sequence of every step."""
_MIN_EVERY = 128
"""A step ends where a snapshot is taken. With fewer tokens, weights are read too often."""
_MAX_EVERY = 1024
"""The second turn of a conversation computes at most so many tokens again."""
_FLOAT_BYTES = 4


class KeptTokens(NamedTuple):
    """What a layer keeps of each sequence."""

    window: int | None
    """Its sliding window; None: it attends to all tokens."""
    chunk: int | None = None
    key_size: int = 1
    """The number of elements of a token's key in all heads."""
    is_latent: bool = False
    """Whether keys are values, too."""


class LayerPlace(NamedTuple):
    """Where the keys and values of a layer are."""

    group: int
    place: int
    """Its place among the layers that a block holds."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The groups of a model's layers. If no layer keeps tokens, a block holds the states of all
    layers."""

    groups: Sequence[CacheGroup]
    places: Sequence[LayerPlace | None]
    """The place of each layer, and then of a predictor; None for a layer without keys and values of
    its own."""
    key_blocks: Sequence[int]
    """For each group, how many blocks of its layers' keys fit into the block of the longest keys.
    With n of them, block k of the pool begins at block n * k of such a layer."""
    num_places: int
    """The number of layers whose tokens fit into a block."""
    states: Sequence[int | None] = ()
    """For each layer, the first piece of its state; None for a layer without a state. All states
    are in the last group. A piece is the room of a layer's keys, or values, in a block. The pieces
    of a block are numbered by place: keys, then values."""
    has_values: bool = True
    """Whether a block has values beside keys, because there are layers whose keys are no values."""

    @property
    def state(self) -> StateCache | None:
        """The group of the states, if there are any."""
        last = self.groups[-1]
        return last if isinstance(last, StateCache) else None


_NO_TOKENS = CacheLayout(groups=(), places=(), key_blocks=(), num_places=0)


def one_group(num_layers: int) -> CacheLayout:
    """All layers keep all tokens."""
    return _one_group(ONE_FULL, num_layers)


def layout_of_spec(
    spec: ModelSpec, max_seq_len: int, provider: Provider, block_size: int, dtype: torch.dtype
) -> CacheLayout:
    """The layout of a model with a cache of this type; see `layout_of`."""
    further = () if spec.predictor is None else (spec.predictor.layer,)
    keepers = [
        None if layer.attention is None or layer.attention.kv_from is not None else layer.attention
        for layer in (*spec.layers, *further)
    ]
    layers = [
        KeptTokens(one.window, one.chunk, one.key_size, one.latent is not None)
        for one in keepers
        if one is not None
    ]
    layout = layout_of(layers, max_seq_len, provider) if layers else _NO_TOKENS
    places = iter(layout.places)
    layout = replace(layout, places=[None if one is None else next(places) for one in keepers])
    if not spec.has_states:
        return replace(layout, has_values=not all(layer.is_latent for layer in layers))
    piece_bytes = block_size * spec.num_kv_heads * spec.head_dim * dtype.itemsize
    sizes = [
        0 if layer.recurrence is None else layer.recurrence.state_size for layer in spec.layers
    ]
    return _with_states(layout, sizes, piece_bytes, block_size)


def _with_states(
    layout: CacheLayout, sizes: Sequence[int], piece_bytes: int, block_size: int
) -> CacheLayout:
    """The layout with states of so many floats in each layer, 0 in layers without a state."""
    states: list[int | None] = []
    num_pieces = 0
    for size in sizes:
        states.append(num_pieces if size else None)
        num_pieces += -(-_FLOAT_BYTES * size // piece_bytes)
    if not layout.groups:
        layout = replace(layout, num_places=-(-num_pieces // 2))
    num_blocks = -(-num_pieces // (2 * layout.num_places))
    # As many tokens as have keys and values in the memory of a snapshot, if any have.
    every = block_size * num_blocks // len(layout.groups) if layout.groups else _MAX_EVERY
    every = min(max(every, _MIN_EVERY), _MAX_EVERY)
    return replace(
        layout,
        groups=[*layout.groups, StateCache(num_blocks, -(-every // block_size) * block_size)],
        key_blocks=[*layout.key_blocks, 1],
        states=states,
    )


def layout_of(
    layers: Sequence[KeptTokens], max_seq_len: int, provider: Provider = "reference"
) -> CacheLayout:
    """The layout of these layers with contexts of up to ``max_seq_len`` tokens, and with the
    attention of this provider.

    All blocks have the same size, so all groups have the same number of places. Layers of the same
    kind are split into several groups if fewer places stay empty that way.
    """
    kinds = [_kind(layer, max_seq_len, TILE_TOKENS[provider]) for layer in layers]
    if len(set(kinds)) == 1:
        return _one_group(kinds[:1], len(layers))
    longest = max(layer.key_size for layer in layers)
    if any(longest % layer.key_size for layer in layers):
        return one_group(len(layers))
    rows = list(zip(kinds, (layer.key_size for layer in layers), strict=True))
    counts = Counter(rows)
    num_places = _num_places(list(counts.values()))
    groups: list[CacheGroup] = []
    key_blocks: list[int] = []
    places: dict[int, LayerPlace] = {}
    for kind, key_size in counts:
        alike = [index for index, row in enumerate(rows) if row == (kind, key_size)]
        for k, index in enumerate(alike):
            if k % num_places == 0:
                groups.append(kind)
                key_blocks.append(longest // key_size)
            places[index] = LayerPlace(len(groups) - 1, k % num_places)
    return CacheLayout(
        groups, [places[index] for index in range(len(rows))], key_blocks, num_places
    )


def _one_group(groups: Sequence[CacheGroup], num_layers: int) -> CacheLayout:
    """A layer with shorter keys than others leaves the rest of its own place empty."""
    places = [LayerPlace(0, index) for index in range(num_layers)]
    return CacheLayout(groups, places, [1], num_places=num_layers)


def _kind(layer: KeptTokens, max_seq_len: int, tile_tokens: int) -> CacheGroup:
    if layer.window is not None and layer.window < max_seq_len:
        return WindowCache(layer.window + tile_tokens - 1)
    # A tile that begins before its chunk would read blocks that were released.
    if layer.chunk is not None and layer.chunk < max_seq_len and layer.chunk % tile_tokens == 0:
        return ChunkCache(layer.chunk)
    return LatentCache() if layer.is_latent else FullCache()


def _num_places(counts: Sequence[int]) -> int:
    """The number of places of a group, for so many layers of each kind: fewest empty places, then
    fewest groups."""

    def num_groups(num_places: int) -> int:
        return sum(-(-count // num_places) for count in counts)

    sizes = [
        size
        for size in range(1, max(counts) + 1)
        if num_groups(size) <= max(_MAX_GROUPS, len(counts))
    ]
    return min(sizes, key=lambda size: (size * num_groups(size), -size))
