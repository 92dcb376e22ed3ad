"""The matrices of all experts of a layer in one, for kernels that compute them together."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.planes import Planes, joined_planes
from kernels.providers import Ops
from worker.model.weights.formats.device_weights import PlaneWeight
from worker.model.weights.weight import DenseWeight, Linear, Weight


class ExpertMatrices(Protocol):
    """The same matrix of all experts."""

    def product(
        self,
        hidden: Tensor,
        bias: Tensor | None,
        order: Tensor,
        starts: Tensor,
        num_shared: int,
        ops: Ops,
    ) -> Tensor:
        """See `kernels.reference.grouped_projection`."""
        ...

    def parts(self) -> Iterator[Weight]:
        """The matrix of each expert, in the same memory."""
        ...


@dataclass(frozen=True, slots=True)
class DenseMatrices:
    """Floats, [num_experts, outputs, inputs]."""

    tensor: Tensor

    def product(
        self,
        hidden: Tensor,
        bias: Tensor | None,
        order: Tensor,
        starts: Tensor,
        num_shared: int,
        ops: Ops,
    ) -> Tensor:
        return ops.grouped_projection(
            hidden, self.tensor, bias, order, starts, num_shared=num_shared
        )

    def parts(self) -> Iterator[Weight]:
        return map(DenseWeight, self.tensor)


@dataclass(frozen=True, slots=True)
class PlaneMatrices:
    """Planes with the outputs of all experts, one expert after another."""

    planes: Planes
    num_experts: int

    def product(
        self,
        hidden: Tensor,
        bias: Tensor | None,
        order: Tensor,
        starts: Tensor,
        num_shared: int,
        ops: Ops,
    ) -> Tensor:
        return ops.grouped_plane_linear(
            hidden, self.planes, bias, order, starts, num_shared=num_shared
        )

    def parts(self) -> Iterator[Weight]:
        outputs = self.planes.outputs // self.num_experts
        for expert in range(self.num_experts):
            rows = slice(expert * outputs, (expert + 1) * outputs)
            yield PlaneWeight(self.planes.rows(rows))


@dataclass(frozen=True, slots=True)
class StackedLinears:
    """The same product of all experts."""

    matrices: ExpertMatrices
    bias: Tensor | None
    """[num_experts, outputs]."""

    def product(
        self, hidden: Tensor, order: Tensor, starts: Tensor, ops: Ops, *, num_shared: int = 1
    ) -> Tensor:
        """See `kernels.reference.grouped_projection`."""
        return self.matrices.product(hidden, self.bias, order, starts, num_shared, ops)

    def parts(self) -> list[Linear]:
        """The product of each expert, with its matrix in the same memory."""
        weights = list(self.matrices.parts())
        biases = [None] * len(weights) if self.bias is None else list(self.bias)
        return list(map(Linear, weights, biases))


@dataclass(frozen=True, slots=True)
class StackedMlps:
    """The two matrices of all experts."""

    gate_up: StackedLinears
    down: StackedLinears


def stacked(linears: Sequence[Linear]) -> StackedLinears | None:
    """The matrices in one; None if they are stored in a way for which there is no such matrix."""
    matrices = _matrices([one.weight for one in linears])
    biases = [one.bias for one in linears if one.bias is not None]
    if matrices is None or len(biases) not in (0, len(linears)):
        return None
    return StackedLinears(matrices, torch.stack(biases) if biases else None)


def _matrices(weights: Sequence[Weight]) -> ExpertMatrices | None:
    floats = [one.tensor for one in weights if isinstance(one, DenseWeight)]
    if len(floats) == len(weights):
        return DenseMatrices(torch.stack(floats))
    planes = [one.planes for one in weights if isinstance(one, PlaneWeight)]
    if len(planes) == len(weights) and len({one.format for one in planes}) == 1:
        return PlaneMatrices(joined_planes(planes), len(planes))
    return None
