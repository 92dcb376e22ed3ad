"""Products with the matrices of experts, in planes of codes and scales."""

from torch import Tensor

from kernels.planes import Planes, check_expert_planes, dequantize_planes
from kernels.reference.grouped_projection import grouped_projection


def grouped_plane_linear(
    hidden: Tensor,
    planes: Planes,
    bias: Tensor | None,
    order: Tensor,
    starts: Tensor,
    *,
    num_shared: int = 1,
) -> Tensor:
    """Return the product of each row with the matrix of its expert: [num_rows, outputs].

    ``planes`` have the outputs of all experts, one expert after another. Everything else is as in
    `kernels.reference.grouped_projection`. Raises `ValueError` if shapes differ.
    """
    check_expert_planes(hidden, planes, bias, order, starts, num_shared)
    weight = dequantize_planes(planes).view(len(starts) - 1, -1, planes.inputs)
    product = grouped_projection(
        hidden.float(),
        weight,
        None if bias is None else bias.float(),
        order,
        starts,
        num_shared=num_shared,
    )
    return product.to(hidden.dtype)
