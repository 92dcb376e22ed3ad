"""A product with a packed matrix."""

import ctypes

import torch
from torch import Tensor

from kernels.native.library import Library, pointer
from kernels.native.packed import PackedWeight
from kernels.shapes import check_shape


def linear(
    library: Library, hidden: Tensor, weight: PackedWeight, *, num_threads: int = 1
) -> Tensor:
    """Return ``hidden @ weight.T + bias``: [num_rows, outputs] float32.

    ``hidden`` is [num_rows, inputs] float32. A row's result does not depend on the other rows. With
    quantized weights the inputs are rounded to 16 bits, a scale for each 32 of them. Raises
    `ValueError` where shapes differ.
    """
    check_shape("hidden", hidden, (None, weight.inputs))
    out = torch.empty(hidden.shape[0], weight.outputs)
    library.functions.warren_linear(
        library.team(num_threads),
        pointer(hidden),
        hidden.shape[0],
        ctypes.byref(weight.view()),
        pointer(out),
    )
    return out
