"""What formats without kernels of their own have in common: matrices are kept in ggml's blocks if
some blocks have the same values, and else expanded as they are read."""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from kernels.native.packed import Rows
from kernels.providers import Ops, Provider
from kernels.quantized import BLOCK_SIZES, BLOCKS, INTEGERS, QuantizedWeight, pack_integers
from kernels.scaled_floats import GROUPS, scaled_groups
from kernels.scaled_layout import dequantize_scaled
from shared.errors import StartupError
from worker.model.weights.formats.blocks import BlockWeight
from worker.model.weights.formats.dense import Dense
from worker.model.weights.formats.device_weights import DeviceMatrix, on_device
from worker.model.weights.formats.interface import Format, Target
from worker.model.weights.sources import TensorSource
from worker.model.weights.weight import DenseWeight, StackedWeight, Weight

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The kinds of tensors that are read without their format."""
INTEGER_BLOCKS = {(4, False): "q4_0", (4, True): "q5_0", (8, False): "q8_0"}
"""The blocks that have the integers of codes of these bits, less the middle code, or less zero
points of any value."""


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

    def selected(self, ids: Tensor) -> "CodedWeight":
        _, inputs = self.shape
        return CodedWeight((len(ids), inputs), self.num_bytes, lambda: self.rows(ids))

    def dense(self, dtype: torch.dtype) -> Tensor:
        return self.decode().to(dtype)

    def native_rows(self) -> Sequence[Rows]:
        raise NotImplementedError


class CodedMatrices(Format):
    """A format whose matrices are codes with scales, several tensors for one matrix. Matrices that
    are stored as floats, such as the matrices of ignored modules, stay as they are."""

    @abstractmethod
    def is_coded(self, source: TensorSource, stem: str) -> bool:
        """Whether the matrix with this name, without ``weight``, is stored as codes."""

    @abstractmethod
    def shape(self, source: TensorSource, stem: str) -> tuple[int, int]:
        """(outputs, inputs) of a coded matrix."""

    @abstractmethod
    def block_format(self, source: TensorSource, stem: str) -> str | None:
        """The format of the blocks that have the values of a coded matrix, as far as names and
        shapes tell; None if there are none."""

    @abstractmethod
    def codes(self, source: TensorSource, stem: str, target: Target) -> DeviceMatrix | None:
        """The codes of a matrix that a GPU may multiply as they are; None if there are none.

        Raises `StartupError` as `coded` does.
        """

    @abstractmethod
    def device_bytes(self, source: TensorSource, stem: str) -> float | None:
        """The memory on a GPU for a weight of a coded matrix; None if the matrix is expanded."""

    @abstractmethod
    def stem(self, name: str) -> str | None:
        """The name of the matrix that a tensor belongs to, without ``weight``."""

    @abstractmethod
    def coded(self, source: TensorSource, stem: str, target: Target) -> Weight:
        """A coded matrix. Raises `StartupError`."""

    def dtype(self, source: TensorSource, device: torch.device) -> torch.dtype:
        """The type of the largest tensor of floats, beside which there are codes."""
        floats = [name for name in source.names if source.kind(name) in FLOATS]
        if not floats:
            raise StartupError("the checkpoint has no weights of a float type")
        return FLOATS[source.kind(max(floats, key=lambda name: math.prod(source.shape(name))))]

    def read(
        self, source: TensorSource, names: list[str], shape: tuple[int, int], target: Target
    ) -> Weight:
        if not any(self.is_coded(source, name.removesuffix("weight")) for name in names):
            return Dense().read(source, names, shape, target)
        on_device = self._on_device(source, names, target)
        parts = (
            [self._part(source, name, target) for name in names]
            if on_device is None
            else [on_device]
        )
        have = (sum(part.shape[0] for part in parts), parts[0].shape[1])
        if have != shape or any(part.shape[1] != shape[1] for part in parts):
            raise StartupError(f"{names[0]} has shape {have}, config.json says {shape}")
        return parts[0] if len(parts) == 1 else StackedWeight(tuple(parts))

    def num_bytes(self, source: TensorSource, target: Target) -> int:
        """The size of matrices in blocks, of expanded matrices and of other tensors, without codes
        and scales."""
        num_bytes, stems = 0.0, set()
        for name in source.names:
            stem = self.stem(name)
            if stem is None or not self.is_coded(source, stem):
                num_bytes += math.prod(source.shape(name)) * target.dtype.itemsize
            else:
                stems.add(stem)
        for stem in stems:
            size = self._bytes_per_weight(source, stem, target) or target.dtype.itemsize
            num_bytes += math.prod(self.shape(source, stem)) * size
        return math.ceil(num_bytes)

    def _bytes_per_weight(self, source: TensorSource, stem: str, target: Target) -> float | None:
        """Of a matrix that is not expanded."""
        if target.provider == "triton":
            return self.device_bytes(source, stem)
        kept = self.block_format(source, stem) if target.provider == "native" else None
        return None if kept is None else BLOCK_SIZES[kept].bytes_per_weight

    def _on_device(self, source: TensorSource, names: list[str], target: Target) -> Weight | None:
        """Matrices that a GPU multiplies as they are; None if there are others."""
        stems = [name.removesuffix("weight") for name in names]
        if target.provider != "triton" or not all(
            self.is_coded(source, stem) and self.device_bytes(source, stem) is not None
            for stem in stems
        ):
            return None
        found = [self.codes(source, stem, target) for stem in stems]
        parts = [codes for codes in found if codes is not None]
        return on_device(parts) if len(parts) == len(stems) else None

    def _part(self, source: TensorSource, name: str, target: Target) -> Weight:
        stem = name.removesuffix("weight")
        if self.is_coded(source, stem):
            return self.coded(source, stem, target)
        if source.kind(name) not in FLOATS:
            raise StartupError(
                f"{name} is stored as {source.kind(name)} without what {self.name} needs"
            )
        return DenseWeight(source.get(name).to(target.device, target.dtype))


class Coded(CodedMatrices):
    """A format with one way to code matrices."""

    suffixes: ClassVar[frozenset[str]]
    """The endings of the names of a matrix's tensors, in place of ``weight``."""
    descriptions: ClassVar[frozenset[str]] = frozenset()
    """The suffixes of short tensors that say how a matrix is coded. They stay in the host's
    memory."""

    @abstractmethod
    def decoder(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int]
    ) -> Callable[[], Tensor]:
        """What computes a matrix [outputs, inputs] from its tensors, by their suffixes.

        Raises `ValueError` if these do not fit together.
        """

    def block_format(self, source: TensorSource, stem: str) -> str | None:
        return None

    def device_bytes(self, source: TensorSource, stem: str) -> float | None:
        return None

    def device_codes(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int]
    ) -> DeviceMatrix | None:
        """The codes of a matrix whose tensors fit together; None if a GPU cannot multiply them."""
        return None

    def blocks(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int], block_format: str
    ) -> QuantizedWeight | None:
        """The matrix in these blocks; None if its values do not fit into them."""
        return None

    def order(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor | None:
        """The inputs of the columns in blocks, [inputs] int32; None: in their order."""
        return None

    def stem(self, name: str) -> str | None:
        for suffix in self.suffixes:
            if name.endswith(f".{suffix}"):
                return name.removesuffix(suffix)
        return None

    def codes(self, source: TensorSource, stem: str, target: Target) -> DeviceMatrix | None:
        tensors, shape, _ = self._checked(source, stem, target)
        return self.device_codes(tensors, shape)

    def _checked(
        self, source: TensorSource, stem: str, target: Target
    ) -> tuple[dict[str, Tensor], tuple[int, int], Callable[[], Tensor]]:
        """The tensors of a matrix, its shape, and what computes it. Raises `StartupError`."""
        stored = {suffix for suffix in self.suffixes if source.has(f"{stem}{suffix}")}
        tensors = {
            suffix: source.get(f"{stem}{suffix}")
            if suffix in self.descriptions
            else source.get(f"{stem}{suffix}").to(target.device)
            for suffix in stored
        }
        shape = self.shape(source, stem)
        try:
            return tensors, shape, self.decoder(tensors, shape)
        except (ValueError, KeyError) as error:
            raise StartupError(f"{stem}weight cannot be read as {self.name}: {error}") from None

    def coded(self, source: TensorSource, stem: str, target: Target) -> Weight:
        tensors, shape, decode = self._checked(source, stem, target)
        if target.provider == "native" and (kept := self.block_format(source, stem)) is not None:
            packed = self.blocks(tensors, shape, kept)
            if packed is not None:
                return BlockWeight(packed, self.order(tensors, shape))
        return CodedWeight(shape, sum(tensor.nbytes for tensor in tensors.values()), decode)


def declared(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The description of the quantization of weights in config.json; None for plain weights."""
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


def layouts_of(config: Mapping[str, Any]) -> set[str]:
    """The layouts of compressed-tensors in a checkpoint; none for other methods."""
    described = declared(config) or {}
    if method_of(config) != "compressed-tensors":
        return set()
    groups = (described.get("config_groups") or {}).values()
    return {str(group.get("format") or described.get("format")) for group in groups}


def are_whole_blocks(inputs: int, num_groups: int) -> bool:
    """Whether groups of inputs of equal sizes consist of whole blocks of integers."""
    return num_groups > 0 and inputs % (num_groups * BLOCKS["q8_0"].inputs) == 0


def integer_blocks(numbers: Tensor, scales: Tensor, block_format: str) -> QuantizedWeight | None:
    """Integers [outputs, inputs] times scales [outputs, groups], in blocks of equal values. None if
    the format lacks an integer, or a scale is not a number of float16."""
    halves, (low, high) = scales.half(), INTEGERS[block_format]
    has_all = numbers.amin() >= low and numbers.amax() <= high
    if not has_all or not torch.equal(halves.float(), scales.float()):
        return None
    return pack_integers(numbers, halves, block_format)


def float8_format(stored: str, inputs: int, width: int) -> str | None:
    """The format of the blocks that have the values of 8-bit floats, stored as this kind with a
    scale for ``width`` inputs; None if there is none."""
    size = GROUPS["float8"]
    are_groups = inputs % size == 0 and (width == inputs or width % size == 0)
    return "float8" if stored == "F8_E4M3" and are_groups else None


def float8_blocks(codes: Tensor, scales: Tensor, block: tuple[int, int]) -> QuantizedWeight | None:
    """8-bit floats [outputs, inputs] times scales [rows, columns], each for a block of so many
    outputs and inputs, in blocks of equal values. None for values that they do not have."""
    outputs, inputs = codes.shape
    rows = torch.arange(outputs) // block[0]
    columns = torch.arange(0, inputs, GROUPS["float8"]) // block[1]
    groups = scaled_groups("float8", codes.view(torch.uint8), scales[rows][:, columns])
    return None if groups is None else QuantizedWeight("float8", groups)


def check_group_size(
    inputs: int, num_groups: int, group_size: int | None, *, are_equal: bool = False
) -> None:
    """Raise `ValueError` unless there are as many groups as config.json says, where -1 is a single
    group. The last of several groups may only be cut off if they need not be equal."""
    if group_size is not None:
        expected = -(-inputs // group_size) if group_size > 0 else 1
        if num_groups != expected or (are_equal and num_groups > 1 and inputs % group_size):
            raise ValueError(
                f"{inputs} inputs in {num_groups} groups, config.json says groups of {group_size}"
            )


class Block(NamedTuple):
    """The part of a matrix that shares a scale. It has all outputs or inputs where the number is
    None."""

    outputs: int | None = None
    inputs: int | None = None

    def of(self, shape: tuple[int, int]) -> tuple[int, int]:
        """The outputs and inputs of a block in a matrix of this shape. The shape of the scales does
        not tell: 5 rows of scales may be for blocks of 116 or of 128 outputs out of 576."""
        return self.outputs or shape[0], self.inputs or shape[1]


def scaled(codes: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Codes [outputs, inputs] times scales [rows, columns], each for a block of so many outputs and
    inputs, in float32. The last blocks may be cut off."""
    if scales.numel() == 1:  # needs no scales in the shape of the matrix
        return codes.float() * scales.float()
    return dequantize_scaled(codes, scales.float(), block)


def check_grid(shape: tuple[int, int], scales: Tensor, block: tuple[int, int]) -> None:
    """Raise `ValueError` unless each block of a matrix has a scale."""
    expected = tuple(-(-size // part) for size, part in zip(shape, block, strict=True))
    if tuple(scales.shape) != expected:
        raise ValueError(f"scales have the shape {tuple(scales.shape)}, not {expected}")


def holds(values: Tensor, condition: Callable[[Tensor], Tensor]) -> bool:
    """Whether a condition is true of all values. Without data, on the meta device, it is assumed
    to be."""
    return values.is_meta or bool(condition(values).all())


def check_finite(scales: Tensor) -> None:
    """Raise `ValueError` for a scale that no matrix has."""
    if not holds(scales, lambda values: values.float().isfinite()):
        raise ValueError("a scale is infinite or NaN")
