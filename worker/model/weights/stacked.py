"""The matrices of all experts of a layer in one tensor, for kernels that compute them together."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.model.weights.weight import DenseWeight, Linear


@dataclass(frozen=True, slots=True)
class StackedLinears:
    """The same matrix of all experts."""

    weight: Tensor
    """[num_experts, outputs, inputs]."""
    bias: Tensor | None
    """[num_experts, outputs]."""

    def parts(self) -> list[Linear]:
        """The matrix of each expert, in the same memory."""
        biases = [None] * len(self.weight) if self.bias is None else list(self.bias)
        return [
            Linear(DenseWeight(matrix), bias)
            for matrix, bias in zip(self.weight, biases, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class StackedMlps:
    """The two matrices of all experts."""

    gate_up: StackedLinears
    down: StackedLinears


def stacked(linears: Sequence[Linear]) -> StackedLinears | None:
    """The matrices in one tensor; None if they are not stored as floats."""
    matrices = [one.weight.tensor for one in linears if isinstance(one.weight, DenseWeight)]
    biases = [one.bias for one in linears if one.bias is not None]
    if len(matrices) < len(linears) or len(biases) not in (0, len(linears)):
        return None
    return StackedLinears(torch.stack(matrices), torch.stack(biases) if biases else None)
