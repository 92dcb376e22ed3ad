"""What formats without kernels of their own have in common: matrices are expanded as they are
read."""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kernels.native.packed import Rows
from kernels.providers import Ops, Provider
from shared.errors import StartupError
from worker.model.weights.formats.dense import Dense
from worker.model.weights.formats.interface import Format, Target
from worker.model.weights.sources import TensorSource
from worker.model.weights.weight import DenseWeight, StackedWeight, Weight

_FLOATS = frozenset({"F32", "F16", "BF16"})


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """A `Weight` that no kernel multiplies as it is."""

    providers: ClassVar[frozenset[Provider]] = frozenset()
    shape: tuple[int, int]
    num_bytes: int
    decode: Callable[[], Tensor]
    """Computes the matrix as floats."""

    def linear(self, hidden: Tensor, bias: Tensor | None, ops: Ops) -> Tensor:
        return ops.projection(hidden, self.dense(hidden.dtype), bias)

    def rows(self, ids: Tensor) -> Tensor:
        return self.decode()[ids]

    def dense(self, dtype: torch.dtype) -> Tensor:
        return self.decode().to(dtype)

    def native_rows(self) -> Sequence[Rows]:
        raise NotImplementedError


class Coded(Format):
    """A format whose matrices are codes with scales, several tensors for one matrix. Matrices that
    are stored as floats, such as those of ignored modules, stay as they are."""

    suffixes: ClassVar[frozenset[str]]
    """What the names of a matrix's tensors have in place of ``weight``."""

    @abstractmethod
    def is_coded(self, source: TensorSource, stem: str) -> bool:
        """Whether the matrix with this name, without ``weight``, is stored as codes."""

    @abstractmethod
    def decoder(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int]
    ) -> Callable[[], Tensor]:
        """What computes a matrix [outputs, inputs] from its tensors, by their suffixes.

        Raises `ValueError` if these do not fit together.
        """

    @abstractmethod
    def shape(self, source: TensorSource, stem: str) -> tuple[int, int]:
        """(outputs, inputs) of a coded matrix."""

    def read(
        self, source: TensorSource, names: list[str], shape: tuple[int, int], target: Target
    ) -> Weight:
        if not any(self.is_coded(source, name.removesuffix("weight")) for name in names):
            return Dense().read(source, names, shape, target)
        parts = [self._part(source, name, target) for name in names]
        have = (sum(part.shape[0] for part in parts), parts[0].shape[1])
        if have != shape or any(part.shape[1] != shape[1] for part in parts):
            raise StartupError(f"{names[0]} has shape {have}, config.json says {shape}")
        return parts[0] if len(parts) == 1 else StackedWeight(tuple(parts))

    def num_bytes(self, source: TensorSource, target: Target) -> int:
        """Of expanded matrices and other tensors, without the codes and scales."""
        num_weights, stems = 0, set()
        for name in source.names:
            stem = self._stem(name)
            if stem is None or not self.is_coded(source, stem):
                num_weights += math.prod(source.shape(name))
            else:
                stems.add(stem)
        num_weights += sum(math.prod(self.shape(source, stem)) for stem in stems)
        return num_weights * target.dtype.itemsize

    def _stem(self, name: str) -> str | None:
        """The name of the matrix that a tensor belongs to, without ``weight``."""
        for suffix in self.suffixes:
            if name.endswith(f".{suffix}"):
                return name.removesuffix(suffix)
        return None

    def _part(self, source: TensorSource, name: str, target: Target) -> Weight:
        stem = name.removesuffix("weight")
        if not self.is_coded(source, stem):
            if source.kind(name) not in _FLOATS:
                raise StartupError(
                    f"{name} is stored as {source.kind(name)} without what {self.name} needs"
                )
            return DenseWeight(source.get(name).to(target.device, target.dtype))
        tensors = {
            suffix: source.get(f"{stem}{suffix}").to(target.device)
            for suffix in self.suffixes
            if source.has(f"{stem}{suffix}")
        }
        shape = self.shape(source, stem)
        try:
            decode = self.decoder(tensors, shape)
        except (ValueError, KeyError) as error:
            raise StartupError(f"{name} cannot be read as {self.name}: {error}") from None
        return CodedWeight(shape, sum(tensor.nbytes for tensor in tensors.values()), decode)


def declared(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What config.json says about the quantization of weights; None for plain ones."""
    for holder in (config, config.get("text_config") or {}):
        found = holder.get("quantization_config") or holder.get("compression_config")
        if found:
            described: Mapping[str, Any] = found
            return described
    return None


def method_of(config: Mapping[str, Any]) -> str | None:
    """The name of the quantization method."""
    described = declared(config)
    # Older versions of bitsandbytes do not name the method.
    return None if described is None else str(described.get("quant_method") or "bitsandbytes")


def scaled(codes: Tensor, scales: Tensor) -> Tensor:
    """Codes [outputs, inputs] times scales, each for a rectangle of the matrix, in float32.

    ``scales`` is [1], or [rows, columns] of rectangles of equal sizes; the last ones may be cut
    off.
    """
    grid = scales.float()
    if grid.numel() == 1:
        return codes.float() * grid.view(1, 1)
    outputs, inputs = codes.shape
    rows = grid.repeat_interleave(-(-outputs // grid.shape[0]), 0)[:outputs]
    return codes.float() * rows.repeat_interleave(-(-inputs // grid.shape[1]), 1)[:, :inputs]


def check_grid(shape: tuple[int, int], scales: Tensor) -> None:
    """Raise `ValueError` unless `scaled` can divide a matrix among these scales."""
    if scales.numel() == 1:
        return
    fits = scales.ndim == 2 and all(
        0 < count <= size and -(-size // -(-size // count)) == count
        for size, count in zip(shape, scales.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"scales of shape {tuple(scales.shape)} for a matrix of {shape}")


def check_finite(scales: Tensor) -> None:
    """Raise `ValueError` for a scale that no matrix has."""
    if not scales.float().isfinite().all():
        raise ValueError("a scale is infinite or NaN")
