"""The codes of MXFP4 and NVFP4: floats of 4 bits, two in a byte. A float has a sign, two bits of
exponent and one bit of fraction."""

import torch
from torch import Tensor

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def scaled_floats(pairs: Tensor, scales: Tensor) -> Tensor:
    """The floats in bytes [outputs, inputs / 2], the first one in the low half, times the scales
    [outputs, groups] float32 of groups of inputs: [outputs, inputs] float32."""
    values = torch.tensor([*_MAGNITUDES, *(-one for one in _MAGNITUDES)], device=pairs.device)
    codes = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)
    grouped = values[codes.int()].view(*scales.shape, -1)
    return (grouped * scales.unsqueeze(-1)).view(codes.shape)


def check_pairs(pairs: Tensor, scales: Tensor, group: int) -> None:
    """Raise `ValueError` unless each ``group`` of inputs in bytes [outputs, inputs / 2] has one of
    the scales [outputs, groups]."""
    if pairs.dtype != torch.uint8 or pairs.ndim != 2:
        raise ValueError(f"its codes are {tuple(pairs.shape)} {pairs.dtype}, not rows of bytes")
    outputs, inputs = pairs.shape[0], pairs.shape[1] * 2
    if inputs % group:
        raise ValueError(f"{inputs} inputs are not in groups of {group}")
    expected = (outputs, inputs // group)
    if tuple(scales.shape) != expected:
        raise ValueError(f"scales have the shape {tuple(scales.shape)}, not {expected}")
