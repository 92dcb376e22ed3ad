"""The sum of the experts of each token."""

from torch import Tensor

from kernels.shapes import check_shape


def sum_experts(outputs: Tensor, shares: Tensor) -> Tensor:
    """Return the weighted sum of adjacent rows: [num_tokens, size].

    ``outputs`` is [num_tokens * top_k, size], ``shares`` float32 [num_tokens, top_k]. Products are
    rounded to the type of ``outputs``, added in the order of the choice and rounded again. Raises
    `ValueError` if the shapes do not match.
    """
    check_shape("outputs", outputs, (shares.numel(), None))
    weighed = outputs.view(*shares.shape, -1) * shares.unsqueeze(2)
    return weighed.to(outputs.dtype).sum(dim=1)
