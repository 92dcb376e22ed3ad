"""Attention of a prompt at once, in chunks and token by token: the same bits."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.native.library import Library
from kernels.native.paged_attention import attend
from tests.kernels.attention import Case, Tensors, build

LENGTH = 150
POISONED = 70
"""The token that has another value."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kind", [{}, {"sliding_window": 50}, {"has_slopes": True}], ids=["all", "window", "slopes"]
)
@pytest.mark.parametrize("num_heads", [2, 6, 14])
def test_a_token_is_computed_alike_however_a_prompt_is_cut(
    native: Library, num_heads: int, kind: dict[str, Any], dtype: torch.dtype
) -> None:
    case = Case((LENGTH,), (LENGTH,), num_heads, head_dim=48, dtype=dtype, **kind)
    tensors = build(case)
    at_once = _in_chunks(native, case, tensors, LENGTH)
    for size in (1, 2, 45):
        assert torch.equal(_in_chunks(native, case, tensors, size), at_once), size


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_value_that_is_no_finite_number_reaches_no_token_before_it(
    native: Library, value: float
) -> None:
    case = Case((LENGTH,), (LENGTH,), 6, head_dim=48)
    tensors = build(case)
    expected = _in_chunks(native, case, tensors, LENGTH)
    block = tensors.block_tables[0, POISONED // case.block_size]
    tensors.value_cache[block, POISONED % case.block_size] = value

    actual = _in_chunks(native, case, tensors, LENGTH)

    assert torch.equal(actual[:POISONED], expected[:POISONED])
    assert not actual[POISONED:].isfinite().any()


def _in_chunks(native: Library, case: Case, tensors: Tensors, size: int) -> Tensor:
    chunks = []
    for start in range(0, LENGTH, size):
        end = min(start + size, LENGTH)
        chunks.append(
            attend(
                native,
                tensors.query[start:end].float(),
                tensors.key_cache,
                tensors.value_cache,
                tensors.block_tables,
                torch.tensor([0, end - start]).int(),
                torch.tensor([end]).int(),
                spec=case.spec,
            )
        )
    return torch.cat(chunks)
