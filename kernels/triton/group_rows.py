"""The rows of each expert, found on the device without waiting for it."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.configurations import Configuration, launch

_BLOCK = 1024


def group_rows(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """See `kernels.reference.group_rows`. A program for each expert reads the experts of all rows,
    so that no two programs have to agree and the order is always the same."""
    num_rows = chosen.numel()
    order = torch.empty(num_rows, dtype=torch.int32, device=chosen.device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=chosen.device)
    launch(_configuration(), (num_experts + 1,), order, starts, chosen.contiguous(), num_rows)
    return order, starts


@triton.jit(do_not_specialize=["num_rows"])
def group_rows_kernel(order_ptr, starts_ptr, chosen_ptr, num_rows, BLOCK: tl.constexpr):
    """The rows of an expert per program; a last program has only the end of all rows."""
    expert = tl.program_id(0)
    smaller = tl.zeros([BLOCK], tl.int32)
    for first in tl.range(0, num_rows, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        chosen = tl.load(chosen_ptr + rows, mask=rows < num_rows, other=1 << 30)
        smaller += (chosen < expert).to(tl.int32)
    place = tl.sum(smaller)
    tl.store(starts_ptr + expert, place)
    for first in tl.range(0, num_rows, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        chosen = tl.load(chosen_ptr + rows, mask=rows < num_rows, other=1 << 30)
        is_own = chosen == expert
        ranks = tl.cumsum(is_own.to(tl.int32))
        tl.store(order_ptr + place + ranks - 1, rows, mask=is_own)
        place += tl.sum(is_own.to(tl.int32))


@cache
def _configuration() -> Configuration:
    return Configuration(
        kernel=group_rows_kernel,
        signature={
            "order_ptr": "*i32:16",
            "starts_ptr": "*i32:16",
            "chosen_ptr": "*i64:16",
            "num_rows": "i32",
        },
        constexprs={"BLOCK": _BLOCK},
    )


CONFIGURATIONS = [_configuration()]
