"""Draws a token per row from its softmax, by inversion of its cumulative distribution."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference.draw_rows import check_draws
from kernels.triton.configurations import Configuration, launch
from kernels.triton.filter_floors import logit_scale
from kernels.triton.most_likely import find_most_likely

_BLOCK = 4096
_MAX_VOCAB_SIZE = 262144
"""Compiled ahead of time; a smaller vocabulary needs fewer registers."""


def draw_rows(logits: Tensor, temperatures: Tensor, floors: Tensor, uniforms: Tensor) -> Tensor:
    """See `kernels.reference.draw_rows`, with which it agrees up to rounding.

    Reads a greedy row once, other rows twice and a block of them a third time.
    """
    check_draws(logits, temperatures, floors, uniforms)
    logits = logits.float().contiguous()
    num_rows, vocab_size = logits.shape
    drawn = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        configuration = _configuration(_padded_blocks(vocab_size))
        params = [t.contiguous() for t in (temperatures, floors, uniforms)]
        launch(configuration, (num_rows,), drawn, logits, *params, vocab_size)
    return drawn


@triton.jit
def draw_rows_kernel(
    drawn_ptr,
    logits_ptr,
    temperatures_ptr,
    floors_ptr,
    uniforms_ptr,
    vocab_size,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
):
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * vocab_size
    temperature = tl.load(temperatures_ptr + row)
    most, token = find_most_likely(row_ptr, vocab_size, BLOCK)
    if (temperature > 0) & (token >= 0):
        floor = tl.load(floors_ptr + row)
        scale = logit_scale(temperature)
        blocks = tl.arange(0, NUM_BLOCKS)
        masses = tl.zeros([NUM_BLOCKS], tl.float32)
        for block in range(tl.cdiv(vocab_size, BLOCK)):
            weights = _weights(row_ptr, block, vocab_size, floor, most, scale, BLOCK)
            masses = tl.where(blocks == block, tl.sum(weights), masses)
        ends = tl.cumsum(masses)
        target = tl.load(uniforms_ptr + row) * tl.max(ends)
        # The first block with weight whose end is beyond the target. If rounding of the sums leaves
        # none, the last block with weight.
        last = tl.max(tl.where(masses > 0, blocks, 0))
        block = tl.min(tl.where((ends > target) & (masses > 0), blocks, last))
        start = tl.sum(tl.where(blocks == block - 1, ends, 0.0))
        weights = _weights(row_ptr, block, vocab_size, floor, most, scale, BLOCK)
        columns = tl.arange(0, BLOCK)
        is_reached = (start + tl.cumsum(weights) > target) & (weights > 0)
        last = tl.max(tl.where(weights > 0, columns, 0))
        token = block * BLOCK + tl.min(tl.where(is_reached, columns, last))
    tl.store(drawn_ptr + row, token.to(tl.int64))


@triton.jit
def _weights(row_ptr, block, vocab_size, floor, most, scale, BLOCK: tl.constexpr):
    """The weights of a block's tokens; zero below the floor."""
    columns = block * BLOCK + tl.arange(0, BLOCK)
    is_there = columns < vocab_size
    logits = tl.load(row_ptr + columns, mask=is_there, other=float("-inf"))
    weights = tl.exp2((logits - most) * scale)
    return tl.where(is_there & (logits >= floor), weights, 0.0)


def _padded_blocks(vocab_size: int) -> int:
    return int(triton.next_power_of_2(triton.cdiv(vocab_size, _BLOCK)))


@cache
def _configuration(num_blocks: int) -> Configuration:
    rows = ("temperatures_ptr", "floors_ptr", "uniforms_ptr")
    return Configuration(
        kernel=draw_rows_kernel,
        signature={
            "drawn_ptr": "*i64:16",
            "logits_ptr": "*fp32:16",
            **dict.fromkeys(rows, "*fp32:16"),
            "vocab_size": "i32:16",
        },
        constexprs={"BLOCK": _BLOCK, "NUM_BLOCKS": num_blocks},
        num_warps=16,
    )


CONFIGURATIONS = [_configuration(_padded_blocks(_MAX_VOCAB_SIZE))]
