"""Tensors that are parts of a checkpoint's tensors, or have their rows in another order."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from shared.errors import StartupError
from worker.model.spec import Attention, Experts, LayerNames
from worker.model.weights.rotation import rotated_order
from worker.model.weights.sources import TensorSource

_KINDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


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

    @property
    def is_changed(self) -> bool:
        """Whether there are tensors that the checkpoint does not store like this."""
        return bool(self._made)

    def kind(self, name: str) -> str:
        return _KINDS[self.get(name).dtype] if name in self._made else self._source.kind(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.get(name).shape) if name in self._made else self._source.shape(name)

    def get(self, name: str) -> Tensor:
        return self._made[name](self._source) if name in self._made else self._source.get(name)

    def check_shape(self, names: list[str], shape: tuple[int, ...]) -> None:
        shapes = [self.shape(name) for name in names]
        have = (sum(one[0] for one in shapes), *shapes[0][1:]) if () not in shapes else ()
        if have != shape or any(one[1:] != shape[1:] for one in shapes):
            raise StartupError(f"{names[0]} has shape {have}, config.json says {shape}")

    def read(
        self, names: list[str], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        if not any(name in self._made for name in names):
            return self._source.read(names, shape, dtype, device)
        self.check_shape(names, shape)
        return torch.cat([self.get(name).to(device, dtype) for name in names])


Made = dict[str, Callable[[TensorSource], Tensor]]


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
    if len(names.qkv) == 1:
        values = torch.arange(spec.num_kv_heads * spec.head_dim)
        rows[names.qkv[0]] = torch.cat(
            (queries, keys + len(queries), values + len(queries) + len(keys))
        )
    else:
        rows[names.qkv[0]], rows[names.qkv[1]] = queries, keys
    if spec.qk_norm is not None and spec.qk_norm.norm.has_weight:
        is_per_head = spec.qk_norm.over == "head"
        rows[names.query_norm] = order if is_per_head else queries
        rows[names.key_norm] = order if is_per_head else keys
    return {
        name: _reordered(name, index)
        for stem, index in rows.items()
        for name in (f"{prefix}{stem}.weight", f"{prefix}{stem}.bias")
    }


def _reordered(name: str, rows: Tensor) -> Callable[[TensorSource], Tensor]:
    def made(source: TensorSource) -> Tensor:
        stored = source.get(name)
        if len(stored) != len(rows):
            raise StartupError(f"{name} has {len(stored)} rows, config.json says {len(rows)}")
        return stored[rows]

    return made


def values_from_keys(names: LayerNames, prefix: str) -> Made:
    """The matrix of values where it is that of keys."""
    _, keys, values = names.qkv

    def same(kind: str) -> Callable[[TensorSource], Tensor]:
        return lambda source: source.get(f"{prefix}{keys}.{kind}")

    return {f"{prefix}{values}.{kind}": same(kind) for kind in ("weight", "bias")}


def single_experts(spec: Experts, names: LayerNames, prefix: str) -> Made:
    """Each expert's weights and biases, from tensors that hold those of all experts."""
    made: Made = {}
    stems = [*names.expert_gate_up, names.expert_down]
    for stem in stems:
        is_gate_up = stem != names.expert_down
        is_alternating = names.are_gates_interleaved and is_gate_up and spec.expert.is_gated
        for index in range(spec.count):
            for kind in ("weight", "bias"):
                made[f"{prefix}{expert_name(stem, index)}.{kind}"] = _sliced(
                    f"{prefix}{stem}" + ("" if kind == "weight" else "_bias"),
                    index,
                    is_transposed=names.are_experts_transposed and kind == "weight",
                    is_alternating=is_alternating,
                )
    return made


def expert_name(stem: str, index: int) -> str:
    """The name of one expert's matrix."""
    return stem.format(index) if "{}" in stem else f"{stem}.{index}"


def _sliced(
    name: str, index: int, *, is_transposed: bool, is_alternating: bool
) -> Callable[[TensorSource], Tensor]:
    def made(source: TensorSource) -> Tensor:
        stored = source.get(name)
        if index >= len(stored):
            raise StartupError(f"{name} has {len(stored)} experts, config.json says more")
        matrix = stored[index].t() if is_transposed else stored[index]
        return torch.cat((matrix[::2], matrix[1::2])) if is_alternating else matrix

    return made


def derived(source: TensorSource, made: Iterator[Made]) -> DerivedSource:
    """The source with everything that is made."""
    return DerivedSource(source, {name: make for part in made for name, make in part.items()})
