"""Matrices of 8-bit numbers with scales for blocks: a matrix, its outputs, groups of inputs or
squares, as checkpoints in FP8 and INT8 have them."""

import torch
from torch import Tensor

from kernels.shapes import check_shape

CODES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
_STEPS = (128, 64, 32)
"""The numbers of inputs that are multiplied before a scale; the first that divides a block."""


def step_inputs(inputs: int, block_inputs: int) -> int | None:
    """The number of inputs that are multiplied at a time, which have the same scales; None if
    blocks have no such number."""
    if block_inputs >= inputs:
        return _STEPS[0]
    return next((step for step in _STEPS if block_inputs % step == 0), None)


def dequantize_scaled(codes: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """[outputs, inputs] float32."""
    outputs, inputs = codes.shape
    rows = scales.repeat_interleave(block[0], 0)[:outputs]
    return codes.float() * rows.repeat_interleave(block[1], 1)[:, :inputs]


def check_scaled(
    hidden: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, block: tuple[int, int]
) -> None:
    """Raise `ValueError` if shapes or types do not match."""
    outputs, inputs = codes.shape
    check_shape("codes", codes, (None, hidden.shape[-1]))
    if codes.dtype not in CODES:
        raise ValueError(f"codes of {codes.dtype}, expected 8 bits")
    check_shape("scales", scales, (-(-outputs // block[0]), -(-inputs // block[1])))
    if scales.dtype != torch.float32:
        raise ValueError(f"scales of {scales.dtype}, expected float32")
    if step_inputs(inputs, block[1]) is None:
        raise ValueError(f"blocks of {block[1]} inputs, expected a multiple of {_STEPS[-1]}")
    if bias is not None:
        check_shape("bias", bias, (outputs,))
