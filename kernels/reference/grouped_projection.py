"""Products with several matrices, each of which has rows of its own."""

from itertools import pairwise

from torch import Tensor
from torch.nn import functional

from kernels.shapes import check_shape


def grouped_projection(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    order: Tensor,
    starts: Tensor,
    *,
    num_shared: int = 1,
) -> Tensor:
    """Return the product of each row with the matrix of its expert: [num_rows, outputs].

    ``hidden`` is [num_rows / num_shared, inputs]: ``num_shared`` adjacent rows of the result have
    the same inputs. ``weight`` is [num_experts, outputs, inputs], ``bias`` [num_experts, outputs]
    or None, all of the same dtype. ``order`` [num_rows] and ``starts`` [num_experts + 1] are the
    results of `kernels.reference.group_rows`. Raises `ValueError` if shapes differ.
    """
    check_groups(hidden, weight, bias, order, starts, num_shared)
    out = hidden.new_empty(len(order), weight.shape[1])
    places = starts.tolist()
    for expert, (begin, end) in enumerate(pairwise(places)):
        if begin < end:
            rows = order[begin:end].long()
            own = None if bias is None else bias[expert]
            out[rows] = functional.linear(hidden[rows // num_shared], weight[expert], own)
    return out


def check_groups(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    order: Tensor,
    starts: Tensor,
    num_shared: int,
) -> None:
    """Raise `ValueError` if shapes differ."""
    check_shape("weight", weight, (None, None, hidden.shape[-1]))
    check_shape("hidden", hidden, (len(order) // num_shared, None))
    check_shape("starts", starts, (len(weight) + 1,))
    if bias is not None:
        check_shape("bias", bias, weight.shape[:2])
