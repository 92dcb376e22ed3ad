"""Finds the most likely token of each row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference.most_likely import NO_TOKEN
from kernels.triton.configurations import Configuration, launch

_BLOCK = 4096
_NO_TOKEN = tl.constexpr(NO_TOKEN)


def most_likely(logits: Tensor) -> Tensor:
    """See `kernels.reference.most_likely`. Returns the first token of a tie; reads a row once."""
    logits = logits.float().contiguous()
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        launch(_CONFIGURATION, (num_rows,), tokens, logits, vocab_size)
    return tokens


@triton.jit
def most_likely_kernel(tokens_ptr, logits_ptr, vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * vocab_size
    _, token = find_most_likely(row_ptr, vocab_size, BLOCK)
    tl.store(tokens_ptr + row, token.to(tl.int64))


@triton.jit
def find_most_likely(row_ptr, vocab_size, BLOCK: tl.constexpr):
    """The maximum logit, and the first token that has it, or `NO_TOKEN`."""
    columns = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    tokens = columns
    odd = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        is_there = start + columns < vocab_size
        logits = tl.load(row_ptr + start + columns, mask=is_there, other=float("-inf"))
        # A comparison with NaN is false.
        odd = tl.where(logits < float("inf"), odd, 1)
        is_higher = logits > highest
        highest = tl.where(is_higher, logits, highest)
        tokens = tl.where(is_higher, start + columns, tokens)
    most = tl.max(highest)
    token = tl.min(tl.where(highest == most, tokens, vocab_size))
    is_finite = (tl.max(odd) == 0) & (most > float("-inf"))
    return most, tl.where(is_finite, token, _NO_TOKEN)


_CONFIGURATION = Configuration(
    kernel=most_likely_kernel,
    signature={"tokens_ptr": "*i64:16", "logits_ptr": "*fp32:16", "vocab_size": "i32:16"},
    constexprs={"BLOCK": _BLOCK},
    num_warps=16,
)
CONFIGURATIONS = [_CONFIGURATION]
