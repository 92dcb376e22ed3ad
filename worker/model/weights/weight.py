"""A matrix of weights, whatever its format."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kernels.native.packed import Rows, can_be_stacked
from kernels.providers import Ops, Provider


class Weight(Protocol):
    """A matrix [outputs, inputs].

    Every weight can be expanded to floats, which is how a provider without a kernel for its format
    uses it.
    """

    @property
    def providers(self) -> frozenset[Provider]:
        """The providers that multiply by the weight as it is."""
        ...

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        ...

    @property
    def num_bytes(self) -> int:
        """The memory that the weight takes."""
        ...

    def linear(self, hidden: Tensor, bias: Tensor | None, ops: Ops) -> Tensor:
        """Return ``hidden @ weight.T + bias``: [num_tokens, outputs]."""
        ...

    def rows(self, ids: Tensor) -> Tensor:
        """The outputs ``ids``, [any] int64, as floats: [any, inputs]."""
        ...

    def selected(self, ids: Tensor) -> "Weight":
        """The outputs ``ids``, [any] int64, in the same format: [any, inputs]."""
        ...

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The whole matrix as floats; the same memory if it is stored like this."""
        ...

    def native_rows(self) -> Sequence[Rows]:
        """The outputs in their order, for the native library. Only if it is a provider."""
        ...


@dataclass(frozen=True, slots=True)
class Linear:
    """``weight`` is [outputs, inputs], ``bias`` [outputs]."""

    weight: Weight
    bias: Tensor | None

    def product(self, hidden: Tensor, ops: Ops) -> Tensor:
        """[num_tokens, outputs], from ``hidden`` [num_tokens, inputs]."""
        return self.weight.linear(hidden, self.bias, ops)


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A `Weight` that is stored as floats."""

    providers: ClassVar[frozenset[Provider]] = frozenset({"reference", "native", "triton"})
    tensor: Tensor
    """[outputs, inputs]."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.tensor.shape[0], self.tensor.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.tensor.nbytes

    def linear(self, hidden: Tensor, bias: Tensor | None, ops: Ops) -> Tensor:
        return ops.projection(hidden, self.tensor, bias)

    def rows(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self.tensor)

    def selected(self, ids: Tensor) -> "DenseWeight":
        return DenseWeight(self.tensor[ids])

    def dense(self, dtype: torch.dtype) -> Tensor:
        return self.tensor.to(dtype)

    def native_rows(self) -> Sequence[Rows]:
        return [Rows.of_floats(self.tensor)]


@dataclass(frozen=True, slots=True)
class StackedWeight:
    """A `Weight` whose outputs are stored in several ways."""

    parts: tuple[Weight, ...]
    """The parts have equal numbers of inputs."""

    @property
    def providers(self) -> frozenset[Provider]:
        shared = frozenset.intersection(*(part.providers for part in self.parts))
        is_one_product = "native" in shared and can_be_stacked(self.native_rows())
        return shared if is_one_product else shared - {"native"}

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    def linear(self, hidden: Tensor, bias: Tensor | None, ops: Ops) -> Tensor:
        product = torch.cat([part.linear(hidden, None, ops) for part in self.parts], dim=-1)
        return product if bias is None else product + bias

    def rows(self, ids: Tensor) -> Tensor:
        return self.dense(torch.float32)[ids]

    def selected(self, ids: Tensor) -> DenseWeight:
        """Expanded, because outputs of several parts may alternate."""
        return DenseWeight(self.rows(ids))

    def dense(self, dtype: torch.dtype) -> Tensor:
        return torch.cat([part.dense(dtype) for part in self.parts])

    def native_rows(self) -> Sequence[Rows]:
        return [rows for part in self.parts for rows in part.native_rows()]
