"""Rows of products with 4-bit weights are equal in every bit, whatever else is in the batch."""

import pytest
import torch

from kernels.awq_layout import repack_awq
from kernels.providers import load_ops

INPUTS, OUTPUTS = 512, 136


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)],
    ids=str,
)
@pytest.mark.parametrize("num_tokens", [1, 2, 65, 257])
def test_a_row_does_not_depend_on_the_others_where_that_is_asked_for(
    device: torch.device, num_tokens: int, dtype: torch.dtype
) -> None:
    ops = load_ops("triton", is_batch_invariant=True)
    torch.manual_seed(11)
    words = torch.randint(-(2**31), 2**31, (INPUTS + 4, OUTPUTS // 8), device=device).int()
    scales = torch.rand(4, OUTPUTS, device=device)
    packed = repack_awq(words[:INPUTS], words[INPUTS:], scales)
    hidden = torch.randn(258, INPUTS, device=device).to(dtype)

    together = ops.awq_linear(hidden, *packed, group_size=128)

    alone = ops.awq_linear(hidden[:num_tokens], *packed, group_size=128)
    assert torch.equal(alone, together[:num_tokens])
