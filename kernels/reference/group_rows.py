"""The rows of each expert, for the products of a mixture of experts."""

import torch
from torch import Tensor


def group_rows(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Group rows by expert: return them in the order of their experts, and where each expert's
    rows begin.

    ``chosen``, int64 [any, ...] with values below ``num_experts``, has the expert of each row,
    counted over all dimensions. Returns the rows, int32 [num_rows], in which the rows of an expert
    are ascending, and int32 [num_experts + 1]: expert e has the places from element e to element
    e + 1 of the rows.
    """
    experts = chosen.flatten()
    order = torch.sort(experts, stable=True).indices.int()
    starts = torch.zeros(num_experts + 1, dtype=torch.int32, device=chosen.device)
    starts[1:] = torch.bincount(experts, minlength=num_experts).cumsum(0)
    return order, starts
