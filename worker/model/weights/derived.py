"""Tensors that are parts of a checkpoint's tensors, or have their rows in another order."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from shared.errors import StartupError
from worker.model.spec import (
    Attention,
    DeltaNames,
    DeltaNet,
    Experts,
    Latent,
    LatentNames,
    LayerNames,
    Names,
)
from worker.model.weights.formats.coded import FLOATS
from worker.model.weights.formats.interface import Format, Target
from worker.model.weights.rearranged import HeadMatrices, Rearranged, SelectedRows
from worker.model.weights.rotation import rotated_order
from worker.model.weights.sources import TensorSource
from worker.model.weights.weight import StackedWeight, Weight

OF_A_MATRIX = ("weight", "weight_packed", "qweight")
"""The last part of a name that a matrix has in every format."""
_KINDS = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


class DerivedSource:
    """A `TensorSource` in which some names stand for tensors made from another source's, so that
    formats read them like any others."""

    def __init__(
        self, source: TensorSource, made: Mapping[str, Callable[[TensorSource], Tensor]]
    ) -> None:
        self._source = source
        self._made = made

    @property
    def container(self) -> str:
        return self._source.container

    @property
    def directory(self) -> Path:
        return self._source.directory

    @property
    def dtype(self) -> torch.dtype:
        return self._source.dtype

    @property
    def names(self) -> list[str]:
        return self._source.names

    @property
    def unread(self) -> list[str]:
        return self._source.unread

    def has(self, name: str) -> bool:
        return name in self._made or self._source.has(name)

    def kind(self, name: str) -> str:
        made = self._made.get(name)
        if isinstance(made, SelectedRows):
            return self._source.kind(made.name)
        return self._source.kind(name) if made is None else _KINDS[self.get(name).dtype]

    def shape(self, name: str) -> tuple[int, ...]:
        made = self._made.get(name)
        if isinstance(made, SelectedRows):
            return made.num_outputs(), *self._source.shape(made.name)[1:]
        return self._source.shape(name) if made is None else tuple(self.get(name).shape)

    def get(self, name: str) -> Tensor:
        return self._made[name](self._source) if name in self._made else self._source.get(name)

    def check_shape(self, names: list[str], shape: tuple[int, ...]) -> None:
        _check_shapes(names, [self.shape(name) for name in names], shape)

    def read(
        self, names: list[str], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        if not any(name in self._made for name in names):
            return self._source.read(names, shape, dtype, device)
        parts = [self.get(name).to(device, dtype) for name in names]
        _check_shapes(names, [tuple(part.shape) for part in parts], shape)
        return torch.cat(parts)

    def matrix(
        self, stored_as: Format, names: list[str], shape: tuple[int, int], target: Target
    ) -> Weight:
        """The named matrices stacked, [sum of outputs, inputs], read as `Format.read` does. Packed
        matrices that are made of others are read one by one, from the checkpoint itself."""
        made = {name: self._made[name] for name in names if name in self._made}
        rearranged = {name: one for name, one in made.items() if isinstance(one, Rearranged)}
        if not any(one.is_packed(self._source) for one in rearranged.values()):
            return stored_as.read(self, names, shape, target)
        others = shape[0] - sum(one.num_outputs() for one in rearranged.values())

        def read(name: str, of_shape: tuple[int, int]) -> Weight:
            return stored_as.read(self._source, [name], of_shape, target)

        parts: list[Weight] = []
        for is_made, run in groupby(names, rearranged.__contains__):
            if is_made:
                parts += [rearranged[name].weight(read, shape[1]) for name in run]
            else:
                size = (others, shape[1])
                parts.append(stored_as.read(self._source, list(run), size, target))
        return parts[0] if len(parts) == 1 else StackedWeight(tuple(parts))


def _check_shapes(names: list[str], shapes: list[tuple[int, ...]], shape: tuple[int, ...]) -> None:
    """Raise `StartupError` unless tensors of these shapes are [*shape] if they are stacked."""
    have = (sum(one[0] for one in shapes), *shapes[0][1:]) if () not in shapes else ()
    if have != shape or any(one[1:] != shape[1:] for one in shapes):
        raise StartupError(f"{names[0]} has shape {have}, config.json says {shape}")


Made = dict[str, Callable[[TensorSource], Tensor]]


def latent_heads(spec: Attention, latent: Latent, names: LatentNames, prefix: str) -> Made:
    """The matrices that absorb and expand latent vectors for each head, from the matrix that makes
    keys and values of them; and rotary elements in the order in which halves are rotated."""
    stored, size = f"{prefix}{names.up}.weight", latent.key_dim + latent.value_dim
    keys, values = slice(latent.key_dim), slice(latent.key_dim, size)
    made: Made = {}
    if names.keys is None and names.values is None:
        made = {
            f"{prefix}{absorbing(names)}.weight": HeadMatrices(
                stored, spec.num_heads, size, latent.rank, keys, is_transposed=True
            ),
            f"{prefix}{expanding(names)}.weight": HeadMatrices(
                stored, spec.num_heads, size, latent.rank, values
            ),
        }
    order = None if spec.rope is None else rotated_order(spec.rope, spec.rotated_dim)
    if order is None:
        return made
    head = torch.cat((torch.arange(latent.key_dim), order + latent.key_dim))
    queries = torch.cat([head + len(head) * index for index in range(spec.num_heads)])
    vector = torch.cat((torch.arange(latent.rank), order + latent.rank))
    query = names.query if latent.query_rank is None else names.query_up
    return made | {
        f"{prefix}{query}.weight": _reordered(f"{prefix}{query}.weight", queries),
        f"{prefix}{names.down}.weight": _reordered(f"{prefix}{names.down}.weight", vector),
        f"{prefix}{names.down}.bias": _reordered(f"{prefix}{names.down}.bias", vector),
    }


def absorbing(names: LatentNames) -> str:
    """The name of the matrix that latent vectors are made into keys with."""
    return names.keys or f"{names.up}.keys"


def expanding(names: LatentNames) -> str:
    """The name of the matrix that latent vectors are made into values with."""
    return names.values or f"{names.up}.values"


def rotated_heads(spec: Attention, names: LayerNames, prefix: str) -> Made:
    """Weights and biases of queries and keys, and their norms, in the order in which halves of
    heads are rotated; empty if that is the order in which they are stored."""
    order = None if spec.rope is None else rotated_order(spec.rope, spec.head_dim)
    if order is None:
        return {}
    queries, keys = (
        torch.cat([order + head * spec.head_dim for head in range(num_heads)])
        for num_heads in (spec.num_heads, spec.num_kv_heads)
    )
    rows: dict[str, Tensor] = {}
    if spec.kv_from is not None:
        rows[names.qkv[0]] = queries
    elif len(names.qkv) == 1:
        values = torch.arange(spec.num_kv_heads * spec.head_dim)
        rows[names.qkv[0]] = torch.cat(
            (queries, keys + len(queries), values + len(queries) + len(keys))
        )
    else:
        rows[names.qkv[0]], rows[names.qkv[1]] = queries, keys
    if spec.qk_norm is not None and spec.qk_norm.norm.has_weight:
        is_per_head = spec.qk_norm.over == "head"
        rows[names.query_norm] = order if is_per_head else queries
        if spec.kv_from is None:
            rows[names.key_norm] = order if is_per_head else keys
    return {
        name: _reordered(name, index)
        for stem, index in rows.items()
        for name in (f"{prefix}{stem}.weight", f"{prefix}{stem}.bias")
    }


def heads_apart(spec: Attention, names: LayerNames, prefix: str) -> Made:
    """The queries of all heads, all keys and all values: see `LayerNames.are_heads_together`. Heads
    are rotated as they are stored."""
    group = spec.num_heads // spec.num_kv_heads
    rows = torch.arange(spec.qkv_size).view(spec.num_kv_heads, group + 2, spec.head_dim)
    order = torch.cat([part.flatten() for part in torch.split(rows, [group, 1, 1], dim=1)])
    stored = (f"{prefix}{names.qkv[0]}.{kind}" for kind in ("weight", "bias"))
    return {name: _reordered(name, order) for name in stored}


def gated_heads(spec: Attention, names: LayerNames, prefix: str) -> Made:
    """The queries of all heads, and their gates, which are stored after the queries of each head:
    see `gate_name`."""
    order = None if spec.rope is None else rotated_order(spec.rope, spec.head_dim)
    places = torch.arange(spec.head_dim)
    starts = torch.arange(spec.num_heads).unsqueeze(1) * 2 * spec.head_dim
    queries = (starts + (places if order is None else order)).flatten()
    gates = (starts + spec.head_dim + places).flatten()
    stem = f"{prefix}{names.qkv[0]}"
    made: Made = {}
    for kind in ("weight", "bias"):
        for name, rows in ((stem, queries), (gate_name(stem), gates)):
            made[f"{name}.{kind}"] = SelectedRows(f"{stem}.{kind}", rows, 2 * len(queries))
    return made


def gate_name(queries: str) -> str:
    """The name of the matrix that gates are made with, beside the matrix of queries."""
    return f"{queries}.gate"


def delta_heads(spec: DeltaNet, names: DeltaNames, prefix: str) -> Made:
    """Single matrices in which the parts of each key head are together, with all heads of each part
    together; empty if they are stored like this."""
    if names.num_tiled_keys is not None:
        return _with_own_keys(spec, names, names.num_tiled_keys, prefix)
    num_shared = spec.num_heads // spec.num_key_heads
    values = num_shared * spec.value_dim
    parts = {
        names.inputs: [spec.key_dim, spec.key_dim, values, values],
        names.rates: [num_shared, num_shared],
    }
    made: Made = {}
    for stems, sizes in parts.items():
        if len(stems) == 1:
            rows = torch.arange(spec.num_key_heads * sum(sizes)).view(spec.num_key_heads, -1)
            order = torch.cat([part.flatten() for part in torch.split(rows, sizes, dim=1)])
            name = f"{prefix}{stems[0]}.weight"
            made[name] = _reordered(name, order)
    return made


def _with_own_keys(spec: DeltaNet, names: DeltaNames, num_keys: int, prefix: str) -> Made:
    """Queries, keys and values, and their convolution, with the queries and keys of each head of
    values: these heads are stored in the order in which they have all keys again and again."""
    size, num_values = num_keys * spec.key_dim, spec.num_heads * spec.value_dim
    heads = torch.arange(size).view(num_keys, -1)[torch.arange(spec.num_heads) % num_keys].flatten()
    rows = torch.cat((heads, heads + size, torch.arange(num_values) + 2 * size))
    stored = (f"{prefix}{name}.weight" for name in (names.inputs[0], names.convolution[0]))
    return {name: SelectedRows(name, rows, 2 * size + num_values) for name in stored}


def _reordered(name: str, rows: Tensor) -> SelectedRows:
    """All rows of a tensor in this order."""
    return SelectedRows(name, rows, len(rows))


def values_from_keys(spec: Attention, names: LayerNames, prefix: str) -> Made:
    """The matrix of values where it is that of keys."""
    _, keys, values = names.qkv
    rows = torch.arange(spec.num_kv_heads * spec.head_dim)
    return {
        f"{prefix}{values}.{kind}": _reordered(f"{prefix}{keys}.{kind}", rows)
        for kind in ("weight", "bias")
    }


def router_norm(names: LayerNames, prefix: str, hidden_size: int) -> Made:
    """The weight of the norm before a router, which is stored without the factor of products of
    vectors of this length."""
    name = f"{prefix}{names.router_norm}"

    def scaled(source: TensorSource) -> Tensor:
        source.check_shape([name], (hidden_size,))
        return source.get(name).float() / math.sqrt(hidden_size)

    return {f"{name}.weight": scaled}


def single_experts(
    spec: Experts,
    names: LayerNames,
    prefix: str,
    source: TensorSource,
    stacked_parts: Mapping[str, str],
) -> Made:
    """Each expert's weights and biases, from tensors that hold all experts together.

    If a layer has the tensors of a format's ``stacked_parts`` in place of its weights, each expert
    has its part of them: ``experts.down_proj_scales`` makes ``experts.down_proj.0.scales``. Raises
    `StartupError` for other packed tensors.
    """
    made: Made = {}
    for stem in [*names.expert_gate_up, names.expert_down]:
        name, is_gate_up = f"{prefix}{stem}", stem != names.expert_down
        is_alternating = names.are_gates_interleaved and is_gate_up and spec.expert.is_gated
        has_both = is_gate_up and spec.expert.is_gated and len(names.expert_gate_up) == 1
        size = spec.expert.size * (2 if has_both else 1)
        is_coded = any(ending and source.has(f"{name}{ending}") for ending in stacked_parts)
        is_packed = source.has(name) and source.kind(name) not in FLOATS
        # A block of FP8 has a scale for several rows, which cannot alternate.
        if is_packed and (is_alternating or not is_coded):
            raise StartupError(
                f"{name} holds all experts as {source.kind(name)}, which is not supported: use a "
                "checkpoint whose experts are stored one by one, or the original precision"
            )
        parts = stacked_parts if is_coded else {"": "weight"}
        for index in range(spec.count):
            for ending, kind in {**parts, "_bias": "bias"}.items():
                made[f"{prefix}{expert_name(stem, index)}.{kind}"] = _sliced(
                    f"{name}{ending}",
                    index,
                    transposed_from=int(is_gate_up)
                    if names.are_experts_transposed and not is_coded and kind == "weight"
                    else None,
                    size=size,
                    is_alternating=is_alternating,
                )
    return made


def with_stored_experts(names: Names, source: TensorSource, prefix: str) -> Names:
    """The names, except that experts have the names of this layer's tensors: some checkpoints of a
    family hold all experts together, and others each expert in tensors of its own."""
    if "{}" in names.layers.expert_down:
        return names
    apart = f"{names.layers.expert_down.rpartition('.')[0]}.{{}}"
    down = f"{apart}.down_proj"
    if not any(source.has(f"{prefix}{down.format(0)}.{kind}") for kind in OF_A_MATRIX):
        return names
    gate_up = (f"{apart}.gate_proj", f"{apart}.up_proj")
    return replace(names, layers=replace(names.layers, expert_gate_up=gate_up, expert_down=down))


def expert_name(stem: str, index: int) -> str:
    """The name of an expert's matrix."""
    return stem.format(index) if "{}" in stem else f"{stem}.{index}"


def _sliced(
    name: str, index: int, *, transposed_from: int | None, size: int, is_alternating: bool
) -> Callable[[TensorSource], Tensor]:
    """A slice of a tensor. If a dimension is given, slices are transposed from matrices with
    ``size`` elements there, unless their shape says that they have been transposed already."""

    def made(source: TensorSource) -> Tensor:
        stored = source.get(name)
        num_experts = len(stored) if stored.ndim else 0
        if index >= num_experts:
            raise StartupError(f"{name} has {num_experts} experts, config.json says more")
        matrix = stored[index]
        if transposed_from is not None and matrix.shape[transposed_from] == size:
            matrix = matrix.t()
        return torch.cat((matrix[::2], matrix[1::2])) if is_alternating else matrix

    return made


def derived(source: TensorSource, made: Iterator[Made]) -> DerivedSource:
    """The source with everything that is made."""
    return DerivedSource(source, {name: make for part in made for name, make in part.items()})
