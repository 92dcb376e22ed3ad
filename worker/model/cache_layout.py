"""Which of a model's layers share block tables, and where in a block a layer's tokens are."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kernels.providers import TILE_TOKENS, Provider
from worker.engine.cache.layout import ONE_FULL, CacheGroup, ChunkCache, FullCache, WindowCache
from worker.model.spec import ModelSpec

_MAX_GROUPS = 8
"""Each group adds a block table to every sequence of every step."""


class KeptTokens(NamedTuple):
    """What a layer keeps of each sequence."""

    window: int | None
    """Its sliding window; None: it attends to all tokens."""
    chunk: int | None = None
    key_size: int = 1
    """The number of elements of a token's key in all heads."""


class LayerPlace(NamedTuple):
    """Where the keys and values of a layer are."""

    group: int
    place: int
    """Its place among the layers that a block holds."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The groups of a model's layers. A block holds the tokens of ``num_places`` layers."""

    groups: Sequence[CacheGroup]
    places: Sequence[LayerPlace]
    """Of each layer."""
    key_blocks: Sequence[int]
    """Of each group: how many blocks of its layers' keys fit into the block of the longest keys.
    With n of them, block k of the pool begins at block n * k of such a layer."""

    @property
    def num_places(self) -> int:
        return 1 + max(layer.place for layer in self.places)


def one_group(num_layers: int) -> CacheLayout:
    """All layers keep all tokens."""
    return _one_group(ONE_FULL, num_layers)


def layout_of_spec(spec: ModelSpec, max_seq_len: int, provider: Provider) -> CacheLayout:
    """The layout of a model; see `layout_of`."""
    attentions = [layer.attention for layer in spec.layers]
    layers = [KeptTokens(one.window, one.chunk, one.key_size) for one in attentions]
    return layout_of(layers, max_seq_len, provider)


def layout_of(
    layers: Sequence[KeptTokens], max_seq_len: int, provider: Provider = "reference"
) -> CacheLayout:
    """The layout of these layers with contexts of up to ``max_seq_len`` tokens, and with the
    attention of this provider.

    All blocks have the same size, so all groups have the same number of places. Layers of one kind
    are split into several groups if fewer places stay empty that way.
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
    return CacheLayout(groups, [places[index] for index in range(len(rows))], key_blocks)


def _one_group(groups: Sequence[CacheGroup], num_layers: int) -> CacheLayout:
    """A layer with shorter keys than others leaves the rest of its own place empty."""
    return CacheLayout(groups, [LayerPlace(0, index) for index in range(num_layers)], [1])


def _kind(layer: KeptTokens, max_seq_len: int, tile_tokens: int) -> CacheGroup:
    if layer.window is not None and layer.window < max_seq_len:
        return WindowCache(layer.window + tile_tokens - 1)
    if layer.chunk is not None and layer.chunk < max_seq_len:
        return ChunkCache(layer.chunk)
    return FullCache()


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
