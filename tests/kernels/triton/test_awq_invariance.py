"""Rows of products with 4-bit weights are equal in every bit, whatever else is in the batch."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

from kernels.awq_layout import repack_awq
from kernels.providers import load_ops

INPUTS, OUTPUTS, NUM_ROWS = 512, 72, 258


@cache
def products(device: torch.device, dtype: torch.dtype) -> tuple[Callable[[int], Tensor], Tensor]:
    """The products of so many of the first rows alone, and the products of all rows together."""
    ops = load_ops("triton", is_batch_invariant=True)
    torch.manual_seed(11)
    words = torch.randint(-(2**31), 2**31, (INPUTS + 4, OUTPUTS // 8), device=device).int()
    scales = torch.rand(4, OUTPUTS, device=device)
    packed = repack_awq(words[:INPUTS], words[INPUTS:], scales)
    hidden = torch.randn(NUM_ROWS, INPUTS, device=device).to(dtype)

    def of_first(num_tokens: int) -> Tensor:
        return ops.awq_linear(hidden[:num_tokens], *packed, group_size=128)

    return of_first, of_first(NUM_ROWS)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)],
    ids=str,
)
@pytest.mark.parametrize("num_tokens", [1, 2, 65, 257])
def test_a_row_does_not_depend_on_the_others_where_that_is_asked_for(
    device: torch.device, num_tokens: int, dtype: torch.dtype
) -> None:
    of_first, together = products(device, dtype)

    assert torch.equal(of_first(num_tokens), together[:num_tokens])
